"""Samples in a folder on a local disk, behind the caches in memory; see the README here."""
