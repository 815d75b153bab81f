"""The W8A8 linears on NVIDIA GPUs: quantize the activations where the op asks for it, then one GEMM with its epilogue.

Two kernels share this composition: `hopper`, in a folder of its own, for sm_90 and sizes that TMA can address, and the
portable `matmul` for the rest. For the fewest tokens `hopper` is one kernel: its GEMM quantizes the activations itself.
"""
