"""One copy for all ranks of a job: find the job, what its ranks have made, and whether their samples are the same."""
