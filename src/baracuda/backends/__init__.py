"""Backends: each offers kernels, the registry chooses among them."""
