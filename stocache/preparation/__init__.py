"""Preparing a dataset once: samples from wherever they come, into a folder of blocks."""
