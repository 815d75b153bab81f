"""The one spelling of the GPU arithmetic; the contract's bits depend on each line.

| module | what it holds |
| --- | --- |
| `conversions` | stored floats to the math type and back, integers to floats, the canonical NaN |
| `comparisons` | maxima, minima and clamps, and what they make of NaN |
| `division` | correctly rounded quotients and reciprocals |
| `rounding` | quotients rounded to integers between bounds; whether a gradient passes |
| `qparams` | scales and zero points from ranges; the smallest scale |
| `packing` | integers to bytes and words, nibbles to integers |
| `nonlinearity` | relu, gelu, silu |
| `indices` | integer division of indices |

The functions are `@triton.jit` and elementwise, so Gluon kernels call them as Triton kernels do; those that reduce or
that create blocks are for Triton kernels alone. `tests/backends/triton/test_numerics.py` rejects a second spelling.
Launch with `enable_fp_fusion=False`: nothing here may be contracted but what is written as `fused`.
"""
