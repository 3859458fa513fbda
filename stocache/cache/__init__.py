"""The caches: which samples are resident, in which slots, and the protocol by which processes fill them together."""
