"""Recommend settings of the cache and the loader for a dataset on this machine."""
