"""StreamLoader: batches of tensors from text files of any size."""
