"""The costs of loading a dataset, and a model that predicts the seconds of an epoch from them."""
