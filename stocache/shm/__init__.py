"""Shared memory: segments that are reserved before they are written, found by name, and freed with their last process."""
