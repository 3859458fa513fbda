"""Walks, changes, seeds, shards, caches and replays a graph of DataPipes."""
