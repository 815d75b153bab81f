"""Two processes on gloo: tensor-parallel linears to the bit, and training under DDP and FSDP2."""

from __future__ import annotations

import copy
import socket
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import baracuda
from baracuda.nn import QATLinear, QuantizedLinear, SmoothQuantLinear
from baracuda.parallel import ColumnParallel, RowParallel

RANKS = 2
Body = Callable[[DeviceMesh], Any]


def _worker(rank: int, port: int, body: Body, answers: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    try:
        body(init_device_mesh("cpu", (RANKS,)))
        answers.put((rank, ""))
    except BaseException:
        answers.put((rank, traceback.format_exc()))
    dist.barrier()
    dist.destroy_process_group()


def on_two_ranks(body: Body) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=_worker, args=(rank, port, body, answers)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    failures = [text for _, text in (answers.get(timeout=100) for _ in processes) if text]
    for process in processes:
        process.join(timeout=30)
    assert not failures, failures[0]


def same_bits(got: Tensor, expected: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.dtype.itemsize]
    return got.shape == expected.shape and torch.equal(got.contiguous().view(integer), expected.view(integer))


def close(got: Tensor, expected: Tensor) -> bool:
    """In the mean: sums of another length can move an activation across a rounding boundary, one step further."""
    return bool((got - expected).norm() <= 0.02 * expected.norm())


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def linears() -> list[tuple[nn.Module, torch.dtype]]:
    torch.manual_seed(7)
    float_linear = nn.Linear(48, 20)
    made: list[tuple[nn.Module, torch.dtype]] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        made += [
            (QuantizedLinear.from_float(float_linear), dtype),
            (QuantizedLinear.from_float(float_linear, mode="asymmetric", activation="u8"), dtype),
            (QuantizedLinear.from_float(float_linear, weight_element="s4"), dtype),
            (SmoothQuantLinear.from_float(float_linear, 0.03), dtype),
            (SmoothQuantLinear.from_float(float_linear, 0.03, 17), dtype),
        ]
    return made


def _parallel_linears(mesh: DeviceMesh) -> None:
    rank = mesh.get_local_rank()
    for module, dtype in linears():
        x = torch.randn(5, 48, dtype=torch.float64).to(dtype)
        x[0], x[1, 47], x[2, 3] = 0.0, 90.0, float("nan")
        expected = module(x)
        assert isinstance(module, QuantizedLinear | SmoothQuantLinear)

        row = parallelize_module(nn.ModuleDict({"m": copy.deepcopy(module)}), mesh, {"m": RowParallel()})["m"]
        assert isinstance(row.weight, DTensor) and row.weight.placements == (Shard(1),)
        assert row.weight.to_local().shape[1] == module.weight.shape[1] // RANKS
        part = x[:, rank * 24 : (rank + 1) * 24]
        assert same_bits(row(part), expected), (module, dtype)
        assert same_bits(row(x), expected), (module, dtype)
        assert same_bits(row(distribute_tensor(x, mesh, [Shard(1)])), expected), (module, dtype)
        for i in range(len(x)):  # a row alone on two ranks, and in a batch on one
            assert same_bits(row(x[i : i + 1]), expected[i : i + 1]), (module, dtype, i)

        column = parallelize_module(nn.ModuleDict({"m": copy.deepcopy(module)}), mesh, {"m": ColumnParallel()})["m"]
        assert column.weight.placements == column.weight_scale.placements == (Shard(0),)
        assert same_bits(column(x), expected[:, rank * 10 : (rank + 1) * 10].contiguous()), (module, dtype)
        whole = parallelize_module(
            nn.ModuleDict({"m": copy.deepcopy(module)}), mesh, {"m": ColumnParallel(gather_output=True)}
        )
        assert same_bits(whole["m"](distribute_tensor(x, mesh, [Replicate()])), expected), (module, dtype)
        assert same_bits(whole["m"](x[3:4]), expected[3:4]), (module, dtype)


def test_parallel_linears_have_the_bits_of_one_process() -> None:
    on_two_ranks(_parallel_linears)


def _parallel_mlp(mesh: DeviceMesh) -> None:
    torch.manual_seed(1)
    model, x = Mlp(), torch.randn(2, 3, 32)
    baracuda.quantize_model(model)
    expected = model(x)
    parallelize_module(model, mesh, {"up": ColumnParallel(), "down": RowParallel()})
    assert same_bits(model(x), expected)
    with pytest.raises(baracuda.InvalidProblem, match="multiple of 2 ranks, got 21"):
        parallelize_module(nn.ModuleDict({"m": QuantizedLinear(4, 21)}), mesh, {"m": ColumnParallel()})
    with pytest.raises(baracuda.InvalidProblem, match="last axis 24"):
        model.down(torch.randn(2, 7))
    with pytest.raises(baracuda.Unsupported, match="got Linear; quantize the model first"):
        parallelize_module(nn.ModuleDict({"m": nn.Linear(4, 4)}), mesh, {"m": RowParallel()})


def test_a_column_and_a_row_parallel_linear_compose_without_gathering_between_them() -> None:
    on_two_ranks(_parallel_mlp)


def _ddp(mesh: DeviceMesh) -> None:
    torch.manual_seed(2)
    model, x = Mlp(), torch.randn(8, 32)
    baracuda.prepare_qat(model, weight_strategy="learned", activation_strategy="learned")
    alone = copy.deepcopy(model)
    model(x), alone(x)  # initialises the learned activation scales on the same data
    ours = x.chunk(RANKS)[mesh.get_local_rank()]
    together = DistributedDataParallel(model)
    together(ours).square().mean().backward()
    alone(x).square().mean().backward()
    for (name, got), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert got.grad is not None and expected.grad is not None, name
        # LSQ's factor depends on how many elements a rank sees.
        factor = 2**0.5 if name.endswith("activation_fake_quantize.scale") else 1.0
        assert close(got.grad, expected.grad * factor), (name, got.grad, expected.grad * factor)


def test_ddp_averages_the_gradients_of_weights_and_learned_scales() -> None:
    on_two_ranks(_ddp)


def _ddp_from_the_start(mesh: DeviceMesh) -> None:
    torch.manual_seed(2)
    model = Mlp()
    baracuda.prepare_qat(model, activation_strategy="learned", mode="asymmetric", activation="u8")
    together, rank = DistributedDataParallel(model), mesh.get_local_rank()
    optimizer = torch.optim.SGD(together.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        together(torch.randn(8, 32) * (1 + 3 * rank)).square().mean().backward()
        optimizer.step()
    for name, got in model.named_parameters():
        first = got.detach().clone()
        torch.distributed.broadcast(first, 0)
        assert torch.equal(got, first), name


def test_replicas_that_initialise_learned_scales_by_their_first_batch_stay_alike() -> None:
    on_two_ranks(_ddp_from_the_start)


def _ddp_loaded_on_one_rank(mesh: DeviceMesh) -> None:
    trained, model = Mlp(), Mlp()
    for each in (trained, model):
        baracuda.prepare_qat(each, weight_strategy="learned", activation_strategy="learned")
    trained(torch.randn(8, 32))
    if mesh.get_local_rank() == 0:
        model.load_state_dict(trained.state_dict())
    parallel = DistributedDataParallel(model)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    parallel(torch.randn(4, 32)).square().mean().backward()
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]), name  # nobody found scales anew


def test_scales_that_one_rank_has_loaded_reach_the_others() -> None:
    on_two_ranks(_ddp_loaded_on_one_rank)


def _fsdp(mesh: DeviceMesh) -> None:
    for forward, scheme in (("fake", "w8a8"), ("integer", "w8a8"), ("integer", "w4a8")):
        _fsdp_trains(mesh, forward, scheme)


def _fsdp_trains(mesh: DeviceMesh, forward: str, scheme: str) -> None:
    torch.manual_seed(3)
    model, x = Mlp(), torch.randn(8, 32)
    baracuda.prepare_qat(model, scheme, forward=forward)
    alone = copy.deepcopy(model)
    for module in (model.up, model.down):
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    for _ in range(2):
        for each, optimizer, data in zip(
            (model, alone), optimizers, (x.chunk(RANKS)[mesh.get_local_rank()], x), strict=True
        ):
            optimizer.zero_grad()
            each(data).square().mean().backward()
            optimizer.step()
    for (name, got), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert isinstance(got, DTensor)
        assert close(got.full_tensor(), expected), name
    assert isinstance(model.up, QATLinear)
    if forward == "integer":  # what the shards compute is what will be served, whatever the batch
        trained = model(x).detach()
        alone.load_state_dict({name: p.full_tensor() for name, p in model.named_parameters()})
        baracuda.convert(alone)
        assert same_bits(alone(x), trained) and same_bits(alone(x[2:3]), trained[2:3]), scheme


def test_fsdp_trains_sharded_weights_as_one_process_would() -> None:
    on_two_ranks(_fsdp)
