"""Batches that are gathered in one step: their form, where their samples come from, and the batch itself."""
