"""How `baracuda quantize` shows what a run would do."""

from __future__ import annotations

import re
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

_STYLE: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1)}


def drawn(plan: dict[str, Any]) -> list[Table]:
    """The layers, those that are alike in one row; what stays float and why; sizes and estimates."""
    shown = [_layers(plan["layers"])]
    if plan["left"]:
        shown.append(_left(plan["left"]))
    return [*shown, _figures(plan)]


def _layers(layers: list[dict[str, Any]]) -> Table:
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for layer in layers:
        how = layer["scheme"] if layer["method"] == "rtn" else f"{layer['scheme']} {layer['method']}"
        key = _kind(layer["name"]), *layer["shape"], how, layer["group_size"]
        alike.setdefault(key, []).append(layer)
    prefix = _prefix([kind for kind, *_ in alike])
    title = f"Would be quantized, in {prefix.rstrip('.')}" if prefix else "Would be quantized"
    columns = [Column(name, no_wrap=True) for name in ("", "shape", "scheme", "groups", "bits", "MB")]
    table = Table(*columns, Column("layers", overflow="fold"), title=escape(title), title_justify="left", **_STYLE)
    for (kind, n, k, how, size), members in alike.items():
        before, after = (sum(m[key] for m in members) / 1e6 for key in ("bytes_before", "bytes_after"))
        bits = f"{8e6 * after / sum(m['shape'][0] * m['shape'][1] for m in members):.3g}"
        row = (f"{n} x {k}", how, str(size or "-"), bits, f"{before:.1f} to {after:.1f}")
        table.add_row(escape(kind.removeprefix(prefix)), *row, _numbers([m["name"] for m in members]))
    return table


def _prefix(kinds: list[str]) -> str:
    """What all names begin with, up to a dot."""
    parts = [kind.split(".")[:-1] for kind in kinds]
    common = 0
    while all(len(each) > common for each in parts) and len({each[common] for each in parts}) == 1:
        common += 1
    return "".join(f"{part}." for part in parts[0][:common])


def _left(left: list[dict[str, Any]]) -> Table:
    alike: dict[tuple[str, str], list[str]] = {}
    for entry in left:
        alike.setdefault((_kind(entry["name"]), entry["reason"]), []).append(entry["name"])
    table = Table(
        *(Column(name, overflow="fold") for name in ("", "layers", "why")),
        title="Stays float",
        box=SIMPLE_HEAD,
        title_justify="left",
    )
    for (kind, reason), names in alike.items():
        table.add_row(escape(kind), _numbers(names), escape(reason))
    return table


def _figures(plan: dict[str, Any]) -> Table:
    size, estimate = plan["size"], plan["estimate"]
    table = Table(Column(), Column(overflow="fold"), show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("size", f"{size['before'] / 1e6:.1f} MB to {size['after'] / 1e6:.1f} MB, {size['ratio']:.0%}")
    table.add_row(
        "bits", f"{plan['average_bits']:.3f} a weight of the quantized Linears, scales included, the output head aside"
    )
    table.add_row("float", f"{plan['float_share']:.1%} of the parameters of the Linears, the output head aside")
    if (chosen := plan.get("precision")) is not None:
        goal = f"--budget {chosen['budget']:g}" if "budget" in chosen else f"--max-kl {chosen['max_kl']:g}"
        counts = {bits: sum(unit["bits"] == bits for unit in chosen["units"]) for bits in (4, 8, 16)}
        said = f"of {len(chosen['units'])} sets of layers {counts[8]} get 8 bits, {counts[16]} stay float"
        table.add_row("chosen", f"for {goal}: {said}; KL {chosen['kl']:.4f} with rounding to nearest")
    memory = f"{estimate['memory_bytes'] / 2**20:.0f} MiB besides Python and torch"
    table.add_row("estimate", f"{_duration(estimate['seconds'])}, {memory}")
    for note in plan["notes"]:
        table.add_row("note", escape(note))
    return table


def _kind(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _numbers(names: list[str]) -> str:
    """How many there are, and which: 30 (0-29)."""
    found = [re.findall(r"(?<=\.)\d+(?=\.|$)", name) for name in names]
    if any(len(each) != 1 for each in found):
        return str(len(names))
    numbers = sorted(int(each[0]) for each in found)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return f"{len(names)} ({', '.join(str(a) if a == b else f'{a}-{b}' for a, b in runs)})"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"
