"""Prepared samples on disk or at a URL: a folder of blocks, each sample under a checksum."""
