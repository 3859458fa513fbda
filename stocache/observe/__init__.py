"""Why training waits: the figures of each epoch of a loader, and one line with the change to make."""
