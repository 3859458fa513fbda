"""Walk, change, seed, shard, cache and replay a graph of DataPipes."""
