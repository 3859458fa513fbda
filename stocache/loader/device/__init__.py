"""Batches on a GPU: `DeviceBatches` delivers them there, and `DeviceGatherer` has it read cached samples from the cache."""
