"""How long the steps of loading take: recorded in shared memory, summed up by percentile, and shown in traces."""
