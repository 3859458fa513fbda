"""What the machine and its processes give: limits, ranks, child processes, random generators, hashes, waiting."""
