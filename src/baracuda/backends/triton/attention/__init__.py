"""Attention on GPUs: few queries, many keys."""
