"""Changes that keep a model's function: traced, proved, then folded into the weights."""
