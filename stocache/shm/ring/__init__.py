"""Objects from one process to another through a ring of buffers in shared memory, which are used again."""
