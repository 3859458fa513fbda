"""A graph of DataPipes: walked, changed, seeded, sharded, cached and replayed."""
