"""The order of samples: permutations that take no memory, blocks, and the machine that has a sample cached."""
