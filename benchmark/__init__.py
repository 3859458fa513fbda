"""Benchmarks: each module proves a claim; ``python -m benchmark`` lists them."""
