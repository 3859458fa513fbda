"""The machine and its processes: memory limits, ranks, child processes, random generators, hashes, states, locks."""
