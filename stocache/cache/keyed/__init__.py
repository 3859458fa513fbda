"""Parts of samples, cached by key."""
