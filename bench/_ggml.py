"""llama.cpp's own product of a quantized matrix and one token, through the libraries that llama-cpp-python brings.

Optional: `bodies` is empty where that package is not installed. The weight lies in a plain buffer, as in the file.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

from torch import Tensor

from .common import Body

#: ggml's numbers of its types, and the bytes of a weight.
TYPES = {"Q8_0": (8, 34 / 32), "Q4_0": (2, 18 / 32)}
_F32 = 0
#: Room for a graph and for the work data of every call, which are never given back.
_SLACK = 16 << 20


class _Parameters(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def bodies(x: Tensor, weight: Tensor, threads: int, cold: int) -> dict[str, list[Body]]:
    """For each type: x, `[1, K]` f32, times the transposed weight, `[N, K]`; over copies of `cold` bytes together."""
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        return {}
    libraries = Path(found.origin).parent / "lib"
    base, cpu = (ctypes.CDLL(str(libraries / f"lib{name}.so")) for name in ("ggml-base", "ggml-cpu"))
    cpu.ggml_cpu_init()
    return {
        f"llama.cpp {name}": [
            _body(base, cpu, code, x, weight, threads) for _ in range(-int(-cold // (size * weight.numel())))
        ]
        for name, (code, size) in TYPES.items()
    }


def _body(base: Any, cpu: Any, code: int, x: Tensor, weight: Tensor, threads: int) -> Body:
    pointer, size, count = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
    for name in ("ggml_init", "ggml_new_tensor_2d", "ggml_mul_mat", "ggml_new_graph", "ggml_get_data"):
        getattr(base, name).restype = pointer
    base.ggml_quantize_chunk.restype = size
    n, k = weight.shape
    context = pointer(base.ggml_init(_Parameters(2 * weight.numel() + _SLACK, None, False)))
    matrix = pointer(base.ggml_new_tensor_2d(context, code, count(k), count(n)))
    token = pointer(base.ggml_new_tensor_2d(context, _F32, count(k), count(1)))
    data = pointer(base.ggml_get_data(matrix))
    base.ggml_quantize_chunk(code, pointer(weight.data_ptr()), data, count(0), count(n), count(k), None)
    ctypes.memmove(base.ggml_get_data(token), x.data_ptr(), 4 * k)
    product = pointer(base.ggml_mul_mat(context, matrix, token))
    graph = pointer(base.ggml_new_graph(context))
    base.ggml_build_forward_expand(graph, product)

    def body() -> object:
        status = cpu.ggml_graph_compute_with_ctx(context, graph, threads)
        if status:
            raise RuntimeError(f"ggml_graph_compute: status {status}")
        return product

    body()
    expected = (x @ weight.T).view(-1)
    result = (ctypes.c_float * n).from_address(base.ggml_get_data(product))
    worst = max(abs(result[i] - float(expected[i])) for i in range(0, n, 97))
    if worst > 0.2 * float(expected.abs().max()):
        raise RuntimeError(f"llama.cpp's product is not the float one: off by {worst}")
    return body
