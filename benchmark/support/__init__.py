"""What several benchmarks use: peers, descriptions of values, child processes."""
