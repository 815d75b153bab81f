"""The only GPU spelling of divide, round, clamp, in-range and convert; the contract's bits depend on each line.

Launch with `enable_fp_fusion=False`: nothing here may be contracted but the two `fused` steps of the division.
"""
