"""The operators that servers call, on the GPU as vLLM calls them: in inference mode, and captured into CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from baracuda.nn import QuantizedLinear, SmoothQuantLinear
from baracuda.serve import operators

pytestmark = pytest.mark.gpu
TOKENS = (1, 8, 64, 256, 1024)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("static", [False, True])
def test_a_captured_linear_gives_the_bits_of_the_cpu(static: bool, tokens: int) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(512, 768, dtype=torch.bfloat16)
    module = SmoothQuantLinear.from_float(linear, 0.02) if static else QuantizedLinear.from_float(linear)
    inputs = torch.randn(2, tokens, 512, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = [module(one) for one in inputs]
    module = module.cuda()

    def run(x: torch.Tensor) -> torch.Tensor:
        weights = module.weight, module.weight_scale, module.bias, None
        if static:
            return operators.call.int8_static_linear(x, *weights, module.input_scale, None)
        return operators.call.int8_linear(x, *weights, False)

    with torch.inference_mode():
        x = inputs[0].cuda()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(x)  # a server warms up: kernels are compiled before the graph is captured
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(x)
        for one, right in zip(inputs, expected, strict=True):
            x.copy_(one)
            graph.replay()
            assert torch.equal(y.cpu(), right)
