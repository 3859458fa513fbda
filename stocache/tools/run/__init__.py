"""A program that does not know stocache: its loaders become stocache's, and are reported on."""
