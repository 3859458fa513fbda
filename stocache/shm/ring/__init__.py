"""Objects from one process to a second through a ring of buffers in shared memory, which are used again."""
