"""Cache a map-style dataset, or read one from a storage: `CachedDataset`, `StorageDataset`."""
