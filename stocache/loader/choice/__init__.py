"""Choose workers: measure what samples cost in short trials, and predict epochs from it."""
