"""A graph of DataPipes at work: in this process, in worker processes, and in a dispatching one."""
