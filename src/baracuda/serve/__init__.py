"""Servers that compute with baracuda's kernels."""
