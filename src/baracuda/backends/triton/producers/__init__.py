"""Norms and gated products: what runs on the device, how it is launched, and which configuration it gets."""
