"""Shared memory: segments that are reserved before they are written, found by name, and released with the last process."""
