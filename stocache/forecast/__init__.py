"""What a dataset costs to load, and a model that predicts the seconds of an epoch from that."""
