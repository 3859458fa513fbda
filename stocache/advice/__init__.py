"""Which settings to use for a dataset on this machine."""
