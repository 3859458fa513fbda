"""Samples and their bytes: what a sample consists of, and how it is written as a record or as columns and read back."""
