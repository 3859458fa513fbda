"""Prepare a dataset once: samples from any source, into a folder of blocks. A block is a file of consecutive samples.

`sources` opens files and folders, `prepare` loads their samples in child processes, and `ray` does so on a cluster. The blocks
are written by `stocache.storage` and read by `stocache.storage.dataset.StorageDataset`.
"""
