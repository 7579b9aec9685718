"""Measurements beside their floors and peers. `python -m benchmarks.peers` and so on; results under results/."""
