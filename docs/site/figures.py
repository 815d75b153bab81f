"""The pictures, drawn with the library they explain: what a curve shows is what the kernels answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import Tensor

import baracuda
from baracuda import PerChannel, PerGroup, PerTensor, PerToken, Scope
from baracuda_cli.scopes import outlier_activations, sqnr

from . import benchmarks

BLUE, ORANGE, GREEN, GREY = "#3b5bdb", "#e8590c", "#2b8a3e", "#868e96"
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "svg.hashsalt": "baracuda",
    "figure.constrained_layout.use": True,
}

#: A figure, the words for those who do not see it, and the caption with the numbers that were computed.
Drawn = tuple[Figure, str, str]


def draw(name: str, folder: Path, up: str) -> str:
    """Draw a picture into `folder` and return the Markdown that shows it: none where there is nothing to draw."""
    with mpl.rc_context(STYLE):
        drawn = FIGURES[name]()
        if drawn is None:
            return ""
        figure, words, caption = drawn
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    return f"![{words}]({up}pictures/{name}.svg)\n\n*{caption}*"


def ties() -> Drawn:
    """Rounding at the halves, and what rounding them all upwards would do to a mean."""
    figure, (steps, drift) = _axes(2)
    x = torch.arange(-3.5, 3.5, 0.005)
    steps.plot(x, baracuda.quantize(x, 1.0).float(), ".", markersize=1.5, color=BLUE)
    halves = torch.arange(-3.5, 4) + 0.0
    landed = baracuda.quantize(halves, 1.0).float()
    steps.plot(halves, landed, "o", color=ORANGE, label="ties")
    steps.set(title="rint(x / s): ties go to the even neighbour", xlabel="x / s", ylabel="q", yticks=range(-4, 5, 2))
    steps.legend(frameon=False)
    share, biases = tie_bias()
    drift.barh(list(biases), list(biases.values()), color=[GREEN, ORANGE])
    drift.set(title="mean of the rounding error, in steps", xlim=(-0.01, 0.085))
    for i, value in enumerate(biases.values()):
        drift.annotate(f"{value:+.4f}", (max(value, 0), i), xytext=(4, -3), textcoords="offset points")
    words = "A staircase whose ties land on even steps, and bars of the mean rounding error of two rules."
    return figure, words, (
        f"{share:.0%} of normally distributed bf16 values are exact ties under a scale of 2^-5. Rounding every tie "
        f"upwards would shift the mean by {biases['half up']:.3f} of a step; half to even leaves it where it is."
    )  # fmt: skip


@cache
def tie_bias() -> tuple[float, dict[str, float]]:
    """The share of ties in bf16 data under a power-of-two scale, and the mean error of two rules on it."""
    x = _normal(2**22).bfloat16()
    steps = x.double() / 2**-5
    even = baracuda.fake_quantize(x.float(), 2**-5).double() / 2**-5
    inside = steps.abs() < 127
    share = float(((steps - steps.floor()) == 0.5).double().mean())
    up = torch.floor(steps + 0.5)
    return share, {"half to even": _mean(even - steps, inside), "half up": _mean(up - steps, inside)}


def mask() -> Drawn:
    """fake_quantize at the upper end of its range, and its gradient."""
    figure, (forward, backward) = _axes(2, sharex=True)
    x = torch.linspace(4.0, 9.5, 2201)
    y, gradient = _with_gradient(x)
    forward.plot(x, x, color=GREY, linewidth=1, label="x")
    forward.plot(x, y, ".", markersize=1.5, color=BLUE)
    forward.plot([], [], color=BLUE, label="fake_quantize(x, 1.0, q_max=7)")
    forward.set(ylabel="y", title="7 is the last step: what lies above is clamped to it")
    forward.legend(frameon=False)
    backward.fill_between(x, gradient, color=GREEN, alpha=0.35, linewidth=0)
    backward.plot(x, gradient, ".", markersize=1.5, color=GREEN)
    edge = last_in_range()
    backward.axvline(edge, color=ORANGE, linewidth=1)
    backward.axvline(7, color=GREY, linewidth=1, linestyle=":")
    backward.set(xlabel="x", ylabel="dy / dx", title="the gradient passes while rint(x / s) is in range")
    words = "The clamped staircase of fake_quantize near the top of its range, above its gradient, one then zero."
    return figure, words, (
        f"The mask asks the rounded value, so it ends at the last float that rounds to 7, x = {edge!r}, "
        "not at 7.0 (dotted): every x whose output is an unclamped step has a gradient."
    )  # fmt: skip


def last_in_range() -> float:
    """The greatest f32 with a gradient under scale 1 and q_max 7: 7.5 is a tie and rounds to 8."""
    x = torch.nextafter(torch.tensor([7.5]), torch.tensor([0.0]))
    assert _with_gradient(x)[1].item() == 1.0
    assert _with_gradient(torch.tensor([7.5]))[1].item() == 0.0
    return round(x.item(), 7)


def reciprocal() -> Drawn:
    """Where x / s and x * (1 / s) give different integers."""
    figure, (axis,) = _axes(1)
    counts = division_counts()
    total, differing, away, tied = counts["bf16"]
    axis.hist(away, bins=[i / 8 for i in range(-12, 13)], color=BLUE)
    axis.axvline(0, color=ORANGE, linewidth=1)
    axis.set(
        title=f"the {differing:,} of {total:,} bf16 elements that differ",
        xlabel="distance of the exact x / s from a tie, in units of the last f32 place",
        ylabel="elements",
    )
    words = "A histogram: all differing elements lie within one unit in the last place of a tie."
    f32 = counts["f32"]
    return figure, words, (
        f"Dynamic per-token quantization of a normal 4096 x 4096 activation. bf16: {differing:,} of {total:,} elements "
        f"({differing / total:.1e}) come out one step apart; in {tied:.0%} of them the rounded quotient is the tie "
        f"and the product lies a unit beside it, in the rest the other way round. f32: {f32[1]} of {f32[0]:,}."
    )  # fmt: skip


@cache
def division_counts() -> dict[str, tuple[int, int, Tensor, float]]:
    """Per type: elements, those that differ, how far those are from a tie in f32 units, the share of tied quotients."""
    found = {}
    for name, x in (("f32", _normal(4096, 4096)), ("bf16", _normal(4096, 4096).bfloat16())):
        scale, _ = baracuda.choose_qparams(x, scope=PerToken())
        divided = baracuda.quantize(x, scale, scope=PerToken())
        multiplied = baracuda.quantize(x, scale, scope=PerToken(), arithmetic="reciprocal")
        rows, columns = (divided != multiplied).nonzero(as_tuple=True)
        exact = x[rows, columns].double() / scale[rows].double()
        tie = exact.floor() + 0.5
        unit = torch.exp2(torch.floor(torch.log2(tie.abs())) - 23)
        wide, s = x[rows, columns].float(), scale[rows]
        tied, missed = (wide / s).double() == tie, (wide * (1 / s)).double() == tie
        assert ((divided[rows, columns].int() - multiplied[rows, columns].int()).abs() == 1).all()
        assert (tied != missed).all()
        found[name] = (x.numel(), len(rows), (exact - tie) / unit, float(tied.double().mean()))
    return found


def smoothing() -> Drawn:
    """The largest value of every channel of x and of W, before and after the outliers moved."""
    before, after, quality = smoothed()
    figure, axes = _axes(2, sharex=True, sharey=True)
    order = before[0].argsort(descending=True)
    titles = ("as it is", "x / s and W * s: both have the same maxima")
    for axis, pair, title in zip(axes, (before, after), titles, strict=True):
        for values, color, label in zip(pair, (BLUE, ORANGE), ("max |x|", "max |W|"), strict=True):
            axis.semilogy(values[order], ".", markersize=3, color=color, label=label)
        axis.set(title=title, ylabel="of a channel")
    axes[0].legend(frameon=False, loc="upper right")
    axes[1].set_xlabel("channel, largest first")
    words = "Channel maxima of activations and weights: an outlier cliff before smoothing, one level after."
    return figure, words, (
        f"An activation whose every hundredth channel is fifty times too large, quantized with one scale: the int8 "
        f"linear has {quality[0]:.1f} dB of signal over noise as it is, {quality[1]:.1f} dB smoothed."
    )  # fmt: skip


@cache
def smoothed() -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Channel maxima of (x, W) before and after smoothing at alpha 0.5, and the SQNR of each static int8 linear."""
    torch.manual_seed(0)
    x = outlier_activations(1024, 512, torch.device("cpu"))
    weight = 0.02 * torch.randn(512, 512)
    exact = x.double() @ weight.double().T
    strength = (x.abs().amax(0) / weight.abs().amax(0)).sqrt()
    maxima, quality = [], []
    for s in (torch.ones_like(strength), strength):
        scale = float((x / s).abs().max()) / 127
        w = baracuda.dynamic_quantize(weight * s, scope=PerChannel(0))
        y = baracuda.smoothquant_linear(baracuda.quantize(x / s, scale), w.q, scale, w.scale)
        maxima.append([(x / s).abs().amax(0), (weight * s).abs().amax(0)])
        quality.append(sqnr(exact, y))
    return maxima[0], maxima[1], quality


def scopes() -> Drawn:
    """Which elements of a 6 x 8 tensor share a scale."""
    figure, axes = _axes(6, columns=2, height=1.5)
    kinds: list[Scope] = [
        PerTensor(), PerToken(), PerChannel(0), PerChannel(1), PerGroup(4), PerGroup(3, axis=0)
    ]  # fmt: skip
    for axis, scope in zip(axes, kinds, strict=True):
        axis.imshow(segments(scope, (6, 8)).numpy(), cmap="tab20", vmin=0, vmax=19)
        axis.set(title=f"{scope!r}\nview {list(scope.view((6, 8)).shape)}", xticks=[], yticks=[])
    words = "Six 6 by 8 grids coloured by scale: all alike, by row, by column, by groups of a row or a column."
    return figure, words, "A 6 x 8 tensor; elements of one colour share one scale. The view is explained below."


def segments(scope: Scope, shape: tuple[int, ...]) -> Tensor:
    """The number of the segment each element belongs to, read from the scope's view."""
    view = scope.view(shape)
    numbers = torch.arange(view.segments).view(1, view.rows, 1, view.inner)
    return numbers.expand(view.shape).reshape(shape)


def cpu_rates() -> Drawn | None:
    run = benchmarks.read("cpu")
    rows = run["rows"] if run else []
    return _rates([(_label(row), row["element"], row["ratio_to_copy"]) for row in rows if row["quantized"] == "s8"])


def gpu_rates() -> Drawn | None:
    run = benchmarks.read("gpu")
    lines = run["lines"] if run else []
    return _rates([(_label(line), line["element"], line["share"]) for line in lines if line["quantized"] == "s8"])


def _label(row: dict[str, Any]) -> str:
    return f"{row['op']}, {row['scope']}"


def _rates(rows: list[tuple[str, str, float]]) -> Drawn | None:
    """(operation and scope, float type, rate over a copy's) as dots on lines."""
    if not rows:
        return None
    labels = list(dict.fromkeys(label for label, _, _ in rows))
    with mpl.rc_context({"font.size": 8}):
        figure, (axis,) = _axes(1, height=0.19 * len(labels) + 0.6)
        for element, color in (("f32", BLUE), ("bf16", ORANGE), ("f16", GREEN), ("f64", GREY)):
            mine = [(rate, labels.index(label)) for label, kind, rate in rows if kind == element]
            axis.plot(*zip(*mine, strict=True), "o", color=color, markersize=4, label=element) if mine else None
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_yticks(range(len(labels)), labels)
        axis.set(xlabel="rate, as a multiple of a copy's", xlim=(0, None), ylim=(len(labels) - 0.5, -0.5))
        axis.grid(axis="y", linewidth=0.3)
        figure.legend(frameon=False, ncols=4, loc="outside upper center")
    return figure, "Dots: the rate of each operation and scope over that of a copy, by float type.", (
        "To s8. Right of the line an operation moves more bytes in a second than a copy does."
    )  # fmt: skip


def linear_ratios() -> Drawn | None:
    """How many times as fast as bf16 cuBLAS, by tokens and weight."""
    run = benchmarks.read("linear")
    if run is None:
        return None
    figure, axes = _axes(2, sharex=True, height=2.6)
    names = [name for name in dict.fromkeys(row["name"] for row in run["rows"]) if name != "bar"]
    tokens = sorted({row["shape"][0] for row in run["rows"] if row["name"] != "bar"})
    for axis, what, title in zip(axes, ("gemm", "linear"), ("from int8 activations", "from bf16, whole"), strict=True):
        for name in names:
            mine = sorted(
                (row["shape"][0], row["us"]["bf16"] / row["us"][what]) for row in run["rows"] if row["name"] == name
            )
            axis.plot([tokens.index(m) for m, _ in mine], [ratio for _, ratio in mine], "o-", markersize=4, label=name)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(range(len(tokens)), tokens)
        axis.set(title=title, ylabel="over bf16 cuBLAS", ylim=(0, None))
    axes[1].set_xlabel("tokens")
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, ncols=4, fontsize=8, loc="outside upper center")
    return figure, "Lines: the int8 linear's speed over bf16 cuBLAS for growing numbers of tokens.", (
        "Int8 linears of 8B and 70B models, times as fast as bf16 cuBLAS in the same run."
    )  # fmt: skip


def _axes(count: int, columns: int = 1, height: float = 2.2, **options: Any) -> tuple[Figure, list[Any]]:
    """Axes under each other: as wide as a page, and still legible on a phone."""
    rows = -(-count // columns)
    figure = Figure(figsize=(5.4, height * rows + 0.3 * (columns > 1) * rows))
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _mean(error: Tensor, where: Tensor) -> float:
    return float(error[where].mean())


def _with_gradient(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = baracuda.fake_quantize(x, 1.0, q_min=-8, q_max=7)
    y.sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


FIGURES: dict[str, Callable[[], Drawn | None]] = {
    "ties": ties,
    "mask": mask,
    "reciprocal": reciprocal,
    "smoothing": smoothing,
    "scopes": scopes,
    "cpu_rates": cpu_rates,
    "gpu_rates": gpu_rates,
    "linear_ratios": linear_ratios,
}
