"""torch's DataLoader with batches in reusable shared memory."""
