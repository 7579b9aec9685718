"""Measurements beside their floors and peers. `python -m benchmarks.baseline` and so on; results under results/."""
