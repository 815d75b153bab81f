"""The committed benchmark runs as pages; a run that has not been committed is said to be missing, in one sentence."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baracuda.schemes import checkpoint_names
from bench import linear_table, readme

from .markdown import table

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def read(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


#: How a run is made that is not called as its file.
COMMANDS = {
    "gpu-small": "gpu --small",
    "model": "model --schemes w8a8,w4a8,w4a16",
    "model-cpu": "model --device cpu --schemes w8a8,w4a8,w4a16",
    "accuracy-gemma": 'accuracy --model "Gemma type"',
}


def _or_missing(name: str, write: Callable[[dict[str, Any]], str]) -> Callable[[], str]:
    def made() -> str:
        run = read(name)
        command = f"python -m bench {COMMANDS.get(name, name)} --json bench/results/{name}.json"
        return write(run) if run else f"No run is committed yet: `{command}` makes one."

    return made


def model(run: dict[str, Any]) -> str:
    """The rows of `python -m bench model`: milliseconds of each model, and times as fast as the float one."""
    names = list(dict.fromkeys(row["model"] for row in run["rows"]))
    groups: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in run["rows"]:
        groups.setdefault((row["part"], row["size"]), {})[row["model"]] = row
    rows = []
    for (part, size), found in groups.items():
        base = next((row["ms"] for row in found.values() if row["ratio"] == 1), None)
        rows.append([part, size, *(_beside(found.get(name), base) for name in names)])
    memory = [f"{run['memory'][name] / 2**20:.0f} MiB" if name in run["memory"] else "" for name in names]
    rows.append(["memory", "", *memory])
    met = sum(bar["holds"] for bar in run["bars"])
    signs = ["<=" if bar.get("below") else ">=" for bar in run["bars"]]
    bars = [
        [bar["name"], f"{sign} {bar['needed']:g}", f"{bar['measured']:.2f}"]
        for sign, bar in zip(signs, run["bars"], strict=True)
    ]
    text = [
        f"{run['device']}, {readme.shapes_of(run)}, torch {run['torch']}. Milliseconds, and in brackets how many times "
        "as fast as the float model of the same run. `decode` is one more token for each sequence, `prefill` the whole "
        "prompt, `linears` the linears of all layers and nothing else.",
        table(["part", "size", *names], rows, range(2, 2 + len(names))),
    ]
    if bars:
        text += [f"{met} of {len(bars)} bars are met:", table(["what", "needed", "measured"], bars, range(1, 3))]
    return "\n\n".join(text)


def _beside(row: dict[str, Any] | None, base: float | None) -> str:
    if row is None:
        return ""
    return f"{row['ms']:.2f}" if base is None or row["ratio"] == 1 else f"{row['ms']:.2f} ({base / row['ms']:.2f}x)"


def four_bit(run: dict[str, Any]) -> str:
    """The rows of `python -m bench linear` with weights at four bits, where the run has them."""
    rows = linear_table.rows_of(run)
    if not any("w4a8" in row.us for row in rows):
        command = "python -m bench linear --json bench/results/linear.json"
        return f"The committed run has no 4-bit rows yet: `{command}` makes them."
    return linear_table.four_bit_table(rows)


def scheme_costs(run: dict[str, Any]) -> str:
    """The figures of `python -m bench accuracy` by the options that gave them, without those of other tools."""
    rows = [
        [_options(row["name"]), f"{row['perplexity']:.2f}", f"{row['kl']:.3f}", f"{row['top1_agreement']:.1%}"]
        for row in run["rows"]
        if row["name"].partition(",")[0] in checkpoint_names()
    ]
    before = next(row["perplexity"] for row in run["rows"] if row["name"] == "float")
    return "\n\n".join(
        [
            f"{run['model']}, groups of {run['group_size']} at four bits, on held-out text. The float model's "
            f"perplexity is {before:.2f}.",
            table(["options", "perplexity", "KL", "same most likely token"], rows, range(1, 4)),
        ]
    )


def _options(name: str) -> str:
    """`w4a16, smooth auto, gptq` as it is typed."""
    scheme, *parts = name.split(", ")
    typed = {
        "smooth": "--smooth",
        "smooth auto": "--smooth auto",
        "gptq": "--method gptq",
        "weighed scales": "--calibration FILE",
        "builtin": "--calibration builtin",
    }
    return f"`{' '.join([f'--scheme {scheme}', *(typed[part] for part in parts)])}`"


def gains() -> str:
    """README's table."""
    return readme.section({area: run for area in readme.AREAS if (run := read(area)) is not None})


def cpu(run: dict[str, Any]) -> str:
    """Every measurement of `python -m bench cpu`."""
    rows = []
    for row in run["rows"]:
        ours = row["seconds"]["ours"]
        peers = {name: seconds for name, seconds in row["seconds"].items() if name not in ("ours", "copy")}
        rates = f"{row['moved'] / ours / 1e9:.0f}", f"{row['ratio_to_copy']:.0%}"
        ratios = ", ".join(f"{_times(seconds, ours)} {name}" for name, seconds in peers.items())
        rows.append([row["op"], row["scope"], f"{row['element']} {row['quantized']}", *rates, ratios])
    linears = [[f"{r['m']} x {r['n']} x {r['k']}", f"{r['ratio']:.1f}x"] for r in run["linears"]]
    size = " x ".join(map(str, run["shape"]))
    machine = f"{run['machine']}, {run['isa']}, {run['threads']} threads, torch {run['torch']}"
    return "\n\n".join(
        [
            f"{machine}, {size} elements, one run.",
            table(["operation", "scope", "types", "GB/s", "of a copy", "times as fast as"], rows, range(3, 5)),
            "`quantized_linear` over `F.linear` in f32, M x N x K:",
            table(["shape", "times as fast"], linears, range(1, 2)),
        ]
    )


def gpu(run: dict[str, Any]) -> str:
    """The lines of `python -m bench gpu`: shares of the copy rate and times as fast as a peer, medians over types."""
    met = sum(line["share"] >= line["bar"] for line in run["lines"])
    text = [
        f"{run['device']}, torch {run['versions']['torch']}, a copy at {run['copy_terabytes']:.2f} TB/s. "
        f"Shares of the copy rate, the median over integer types; {met} of {len(run['lines'])} measurements "
        "reach their bar (95 %, or 85 % for f64 and strided segments).",
        _by_element(run["lines"], lambda line: line["share"], "{:.0%}"),
    ]
    for peer, who in (("torch.compile", "the kernel torch.compile makes of the formula"), ("torch", "torch's own")):
        beside = [line for line in run["lines"] if peer in line["peers"]]
        if beside:
            ratios = _by_element(beside, lambda line, peer=peer: line["peers"][peer] / line["microseconds"], "{:.2f}x")
            text += [f"Times as fast as {who}:", ratios]
    return "\n\n".join(text)


def _by_element(lines: list[dict[str, Any]], value: Callable[[dict[str, Any]], float], form: str) -> str:
    """A row for each operation and scope, a column for each float type; of several integer types the median."""
    groups: dict[tuple[str, str], dict[str, list[float]]] = {}
    for line in lines:
        groups.setdefault((line["op"], line["scope"]), {}).setdefault(line["element"], []).append(value(line))
    elements = list(dict.fromkeys(line["element"] for line in lines))
    rows = [
        [f"`{op}`", scope, *(form.format(statistics.median(found[e])) if e in found else "" for e in elements)]
        for (op, scope), found in groups.items()
    ]
    return table(["operation", "scope", *elements], rows, range(2, 2 + len(elements)))


def small(run: dict[str, Any]) -> str:
    """The lines of `python -m bench gpu --small`: times as fast as torch.compile's kernel."""
    shapes = list(dict.fromkeys(tuple(line["shape"]) for line in run["lines"]))
    ratios: dict[tuple[str, str, str], dict[tuple[int, ...], float]] = {}
    for line in run["lines"]:
        ratios.setdefault((line["op"], line["scope"], line["element"]), {})[tuple(line["shape"])] = line["ratio"]
    rows = [
        [f"`{op}`", scope, element, *(f"{found[shape]:.2f}x" if shape in found else "" for shape in shapes)]
        for (op, scope, element), found in ratios.items()
    ]
    heads = [" x ".join(map(str, shape)) for shape in shapes]
    return "\n\n".join(
        [
            f"{run['device']}, torch {run['versions']['torch']}, {run['date']}. Times as fast as the kernel that "
            "torch.compile makes of the formula, on the device alone, with data from memory:",
            table(["operation", "scope", "from", *heads], rows, range(3, 3 + len(shapes))),
        ]
    )


def linear(run: dict[str, Any]) -> str:
    """The rows of `python -m bench linear`: ours beside bf16 cuBLAS, int8 through cuBLASLt and row-wise fp8."""
    peers = ("bf16", "fp8", "int_mm")
    rows = []
    for row in run["rows"]:
        us, (m, n, k) = row["us"], row["shape"]
        ratios = [_times(us.get(peer), us["gemm"]) for peer in peers]
        times = [f"{us['gemm']:.1f}", f"{us['linear']:.1f}"]
        whole = _times(us.get("bf16"), us["linear"])
        rows.append([row["name"], f"{m} x {n} x {k}", *times, *ratios, whole, "yes" if row["exact"] else "no"])
    heads = ["GEMM us", "linear us", *(f"GEMM over {peer}" for peer in peers), "linear over bf16", "exact"]
    return "\n\n".join(
        [
            f"{run['device']}, torch {run['torch']}; medians with cold caches, peers interleaved; host time of one "
            f"`plan.run` {run['host_us']:.1f} us.",
            table(["weight", "M x N x K", *heads], rows, range(2, 9)),
        ]
    )


def one_answer(run: dict[str, Any]) -> str:
    """The same rows by their number of tokens: what the invariant linear takes beside kernels that promise nothing."""
    rows = []
    models = [row for row in run["rows"] if row["name"].startswith(("8B", "70B"))]
    for tokens in sorted({row["shape"][0] for row in models}):
        alike = [row for row in models if row["shape"][0] == tokens]
        whole = _span([row["us"]["bf16"] / row["us"]["linear"] for row in alike])
        alone = _span([row["us"]["fp8"] / row["us"]["gemm"] for row in alike])
        rows.append([str(tokens), whole, alone, "yes" if all(row["exact"] for row in alike) else "no"])
    heads = ["tokens", "linear over bf16 cuBLAS", "GEMM over row-wise fp8", "exact"]
    weights = len({row["name"] for row in models})
    return "\n\n".join(
        [
            f"{run['device']}, torch {run['torch']}, {weights} weights of Llama-3 8B and 70B. Times as fast, the least "
            "and the most: the whole int8 linear, from bf16 to bf16, and its product alone, from quantized inputs:",
            table(heads, rows, range(1, 3)),
        ]
    )


def _span(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}x"


def accuracy(run: dict[str, Any]) -> str:
    """The rows of `python -m bench accuracy`: what each way to quantize costs a model, and what it takes."""
    rows = []
    for row in run["rows"]:
        cost = [f"{row['kl']:.4f}", f"{row['top1_agreement']:.1%}"] if "kl" in row else ["", ""]
        time = [f"{row['cpu_seconds']:.0f}", f"{row['peak_mb']:.0f}"] if "cpu_seconds" in row else ["", ""]
        rows.append([row["name"], f"{row['perplexity']:.2f}", *cost, *time])
    met = sum(bar["holds"] for bar in run["bars"])
    bars = [
        [bar["name"], f"{'<=' if bar['below'] else '>='} {bar['needed']:g}", f"{bar['measured']:.2f}"]
        for bar in run["bars"]
    ]
    return "\n\n".join(
        [
            f"{run['model']}, {run['threads']} threads, groups of {run['group_size']} at four bits:",
            table(["", "perplexity", "KL", "same top token", "seconds of a core", "peak MB"], rows, range(1, 6)),
            f"{met} of {len(run['bars'])} bars are met:",
            table(["requirement", "needed", "measured"], bars, range(1, 3)),
        ]
    )


def _times(peer: float | None, ours: float) -> str:
    return "" if peer is None else f"{peer / ours:.1f}x"


def qat_steps() -> str:
    """What quantization adds to a training step, from the committed runs of `python -m bench qat_step`."""
    found = [step for way in ("eager", "compiled") if (run := read(f"qat-step-{way}")) for step in run["steps"]]
    if not found:
        return "No run is committed yet: `python -m bench qat_step` makes one."
    floats = {(step["way"], step["size"]): step["ms"] for step in found if step["step"] == "float"}
    rows = [
        [
            step["way"],
            step["size"],
            step["step"],
            floats[step["way"], step["size"]],
            step["ms"],
            f"{step['added']:+.1f} %",
        ]
        for step in found
        if step["step"] != "float"
    ]
    return table(
        ["way", "width", "forward", "bf16 ms", "ms", "added"], [[*map(_short, row)] for row in rows], range(3, 6)
    )


def _short(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


MAKERS: dict[str, Callable[[], str]] = {
    "qat_steps": qat_steps,
    "bench_cpu": _or_missing("cpu", cpu),
    "bench_gpu": _or_missing("gpu", gpu),
    "bench_gpu_small": _or_missing("gpu-small", small),
    "bench_linear": _or_missing("linear", linear),
    "one_answer_linear": _or_missing("linear", one_answer),
    "bench_linear_four": _or_missing("linear", four_bit),
    "bench_model": _or_missing("model", model),
    "bench_model_waiting": _or_missing("model-waiting", model),
    "bench_model_cpu": _or_missing("model-cpu", model),
    "scheme_costs": _or_missing("accuracy", scheme_costs),
    "gains": gains,
    "bench_accuracy": _or_missing("accuracy", accuracy),
    "bench_accuracy_gemma": _or_missing("accuracy-gemma", accuracy),
}
