"""Checkpoint files: tensors, names, rules, and what is wrong with them."""
