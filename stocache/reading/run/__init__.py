"""Run a graph of DataPipes: in this process, in worker processes, and in a dispatching process."""
