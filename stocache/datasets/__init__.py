"""CachedDataset and StorageDataset: map-style datasets in front of a cache or a storage."""
