"""How long the steps of loading take: recorded in shared memory, summed up as percentiles, and shown in traces."""
