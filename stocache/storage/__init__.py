"""Prepared samples on disk or at a URL, each under a checksum.

A sample is written through `writer.BlockCutter`, `manifest.BlockFolderWriter` and `block.encode`, and read through
`storage.OnDiskBlockDataStorage` and `block.Block`. local.py and remote.py hold the files.
"""
