"""Benchmarks: ours beside every peer that is installed, in one run, as ratios. `python -m bench cpu|gpu|linear`."""
