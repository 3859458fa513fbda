"""Order the samples of an epoch: permutations without memory, blocks, and the machine that has a sample cached."""
