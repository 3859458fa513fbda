"""The machine and its processes: memory limits, mounts, ranks, child processes, random generators, hashes, states, locks."""
