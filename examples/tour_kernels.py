"""A tour for people who call kernels: plans, what they say about themselves, workspace, graphs.

    python examples/tour_kernels.py

Plain Python in cells: editors that know `# %%` run it piece by piece. A few seconds, on a GPU where there is one.
"""

# %% The problem: activations of 512 tokens, quantized per token to int8.
import time
from collections.abc import Callable
from dataclasses import replace

import torch

import baracuda
from baracuda import PerChannel

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
tokens, width = 512, 4096
x = torch.randn(tokens, width, dtype=torch.bfloat16, device=device)


def heading(text: str) -> None:
    print(f"\n== {text}")


# %% A plan is chosen once, for a description. It knows which kernel will run, and what its bits can be relied on for.
heading("A plan, and what it promises")
desc = baracuda.DynamicRangeQuantizeDescriptor(
    n=tokens, d=width, q_min=-127, q_max=127, input_element="bf16", output_element="s8"
)
plan = baracuda.DynamicRangeQuantizePlan.select(desc, device=device)
sku, promise = plan.sku(), plan.precision_guarantee()
print(f"kernel      {sku.backend.value}.{sku.kernel} on {sku.arch}")
print(f"arithmetic  in {promise.math_precision.value}, deterministic: {promise.deterministic}, "
      f"the reference's bits: {promise.matches_reference}")  # fmt: skip
print(f"workspace   {plan.workspace_size()} bytes")

# %% Arguments are checked before anything is written, and can_implement says what run would raise.
heading("A wrong argument, before it costs anything")
args = baracuda.DynamicRangeQuantizeArgs(
    input=x,
    scale_out=torch.empty(tokens, device=device),
    output=torch.empty(tokens, width, dtype=torch.int8, device=device),
)
wrong = replace(args, scale_out=torch.empty(7, device=device))
print(f"can_implement: {plan.can_implement(wrong).reason}")
assert plan.can_implement(args)

# %% Running: no allocation, no choice, no waiting for the device. Everything was decided at select.
heading("Run, and check against the definition")
plan.run(args)
scale = x.float().abs().amax(dim=1) / 127
q = (x.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
assert torch.equal(args.scale_out, scale) and torch.equal(args.output, q)
print(
    f"{args.output.numel()} values and {tokens} scales: the bits of max|x| / 127 and round(x / scale), written in torch"
)

# %% Some problems need room. It is the caller's, so that a server can plan its memory; too little is refused.
heading("Workspace is yours to bring")
tall = torch.randn(64 * tokens, 96, device=device)
columns = baracuda.DynamicRangeQuantizePlan.select(
    baracuda.DynamicRangeQuantizeDescriptor(
        shape=tuple(tall.shape), q_min=-127, q_max=127, scope=PerChannel(-1), input_element="f32"
    ),
    device=device,
)
needed = columns.workspace_size()
out = baracuda.DynamicRangeQuantizeArgs(
    input=tall, scale_out=torch.empty(96, device=device), output=torch.empty_like(tall, dtype=torch.int8)
)
print(f"one scale for each of 96 columns of {tall.shape[0]} rows: {needed} bytes")
if needed:
    try:
        columns.run(out, torch.empty(needed - 1, dtype=torch.uint8, device=device))
    except baracuda.WorkspaceTooSmall as error:
        print(f"one byte less: {error}")
columns.run(out, torch.empty(needed, dtype=torch.uint8, device=device))

# %% What the function does for you, and what it costs: outputs, a plan from a cache, the same kernel.
heading("Plan or function")


def synchronize() -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def microseconds(call: Callable[[], object]) -> float:
    """The best of some batches of calls: other work on the machine only ever adds."""
    best = float("inf")
    for _ in range(20):
        synchronize()
        start = time.perf_counter()
        for _ in range(20):
            call()
        synchronize()
        best = min(best, time.perf_counter() - start)
    return best / 20 * 1e6


small = x[:4].clone()
few = baracuda.DynamicRangeQuantizePlan.select(
    baracuda.DynamicRangeQuantizeDescriptor(n=4, d=width, q_min=-127, q_max=127, input_element="bf16"), device=device
)
prepared = baracuda.DynamicRangeQuantizeArgs(
    input=small,
    scale_out=torch.empty(4, device=device),
    output=torch.empty(4, width, dtype=torch.int8, device=device),
)
room = torch.empty(few.workspace_size(), dtype=torch.uint8, device=device)
by_function = microseconds(lambda: baracuda.dynamic_quantize(small))
by_plan = microseconds(lambda: few.run(prepared, room))
print(f"4 tokens: {by_plan:.0f} us with a plan and prepared arguments, {by_function:.0f} us with the function")

# %% A plan can be captured: the graph holds the launches, and replaying it costs no Python at all.
heading("CUDA graphs")
if device.type == "cuda":
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        few.run(prepared, room)
    small.copy_(torch.randn_like(small))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(prepared.output, baracuda.dynamic_quantize(small).q)
    print(f"replayed on new data, the same bits as a fresh call; {microseconds(graph.replay):.0f} us a replay")
else:
    print("no GPU here: on one, this cell captures the plan and replays it on new data")
