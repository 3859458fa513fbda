"""Turn samples into bytes and back: the kinds of their parts, and the two layouts, records in memory and columns on disk."""
