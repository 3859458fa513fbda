"""What a loader and its workers send each other: requests for batches, and the states of the workers."""
