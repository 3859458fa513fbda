"""The caches: which samples are resident, in which slots, and how processes fill them together."""
