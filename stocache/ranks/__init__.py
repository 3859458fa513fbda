"""One copy for all ranks of a job: find the job and the segments of its ranks, and compare the samples of the ranks."""
