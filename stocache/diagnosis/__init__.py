"""Why training waits: the figures of each epoch of a loader, and one line that says what to change."""
