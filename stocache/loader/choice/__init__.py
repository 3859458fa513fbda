"""Choose workers: run short epochs of the real loader, and take the setting that was the fastest."""
