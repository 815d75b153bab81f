"""The report: what was quantized, what it cost, what was left and why. JSON for machines, a page for people."""

from __future__ import annotations

import math
import platform
import re
import secrets
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...schemes import Recipe
from ..checkpoint.config import quantization_config
from ..checkpoint.directory import MANIFEST, REPORT, REPORT_PAGE, Checkpoint, read_json
from ..checkpoint.manifest import digests, encode, read_manifest
from ..errors import FlowError, os_errors_explained
from ..hf.coverage import float_share
from ..hf.layers import Head, Structure
from .journal import Journal, sync_directory
from .schema import require_report

#: What is sorted as a number. Other scripts have digits that are none to `int`, which also refuses very long ones.
_NUMBER = re.compile("[0-9]{1,18}")


def collect(
    source: Checkpoint,
    out: Path,
    scheme: str,
    recipe: Recipe,
    structure: Structure,
    statistics: dict[str, Any],
    notes: dict[str, Any],
) -> dict[str, Any]:
    """All sections but the last, `run`: they are the same for the same input, on any machine and after any resume."""
    after = sum((out / shard).stat().st_size for shard in source.shards)
    before = sum(file.path.stat().st_size for file in source.shards.values())
    outliers = notes.get("outliers", {})
    usual = recipe.default.method.name
    layers = []
    for name, entry in sorted(statistics.items(), key=lambda item: natural(item[0])):
        layers.append(
            {
                "name": name,
                "shape": entry["shape"],
                "sqnr_db": sqnr_db(entry["signal"], entry["noise"]),
                "max_error": entry["max_error"],
                "measured_rows": entry["measured_rows"],
                "bytes_before": entry["bytes_before"],
                "bytes_after": entry["bytes_after"],
                "bits": structure.choices[name].scheme.weight.bits,
                "group_size": structure.choices[name].scheme.weight.group_size,
                **({"method": entry["method"]} if "method" in entry else {}),
                **({} if (rounding := structure.choices[name].method.name) == usual else {"rounding": rounding}),
                **outliers.get(name, {}),
            }
        )
    return {
        "baracuda": __version__,
        "model": {
            "name": source.directory.resolve().name,
            "architectures": _texts(source.config.get("architectures")),
            "model_type": kind if isinstance(kind := source.config.get("model_type"), str) else None,
        },
        "scheme": quantization_config(recipe, [])["config_groups"]["group_0"] | {"name": scheme},
        **({} if recipe.default.method.name == "rtn" else {"method": recipe.default.method.name}),
        "linears_found_by": structure.source,
        "layers": layers,
        "left": [{"name": n, "reason": r} for n, r in sorted(structure.left.items(), key=lambda i: natural(i[0]))],
        **({} if structure.head is None else {"head": _head(structure.head)}),
        "float_share": float_share(structure, source),
        "notes": [*structure.notes(), *_few_tokens(notes, layers)],
        "smoothing": {key: value for key, value in notes.items() if key != "outliers"} or None,
        "size": {"before": before, "after": after, "ratio": after / before},
        "evaluation": None,
    }


def _head(head: Head) -> dict[str, Any]:
    """The output head that was quantized on request, and what resolving its tie to the embedding added to the files."""
    return {
        "name": head.module,
        "tied_to": head.tensor if head.tied else None,
        "bytes": head.nbytes,
        "bytes_added": head.nbytes if head.is_added else 0,
    }


def _few_tokens(notes: dict[str, Any], layers: list[dict[str, Any]]) -> list[str]:
    """A note where a layer has more inputs than calibration had tokens: their second moments are guesses then."""
    tokens, widest = notes.get("blocks", {}).get("tokens"), max((layer["shape"][1] for layer in layers), default=0)
    if tokens is None or tokens >= widest:
        return []
    return [f"Calibration read only {tokens} tokens for layers of up to {widest} inputs. Give it more text: some "
            "thousand tokens at least."]  # fmt: skip


def _texts(value: Any) -> list[str] | None:
    """A config's list of names; None where it is anything else, since configs come from strangers."""
    return value if isinstance(value, list) and all(isinstance(name, str) for name in value) else None


def run_section(
    before: int, seconds: float, device: torch.device, ranks: int, made_from: dict[str, Any]
) -> dict[str, Any]:
    """The last section: where and how fast this run was made, and from what."""
    return {
        "seconds": seconds,
        "megabytes_per_second": before / seconds / 1e6,
        "device": str(device),
        "ranks": ranks,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "made_from": made_from,
    }


def made_from(content: dict[str, Any]) -> dict[str, Any] | None:
    """What the run of a report was made from; None in a report of a version that did not record it."""
    run = content.get("run")
    made = run.get("made_from") if isinstance(run, dict) else None
    return made if isinstance(made, dict) else None


def sqnr_db(signal: float, noise: float) -> float | None:
    """Signal over quantization noise in decibels; None where there is no noise, or no signal."""
    return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else None


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 2 before layer 10."""
    return [(int(part), "") if _NUMBER.fullmatch(part) else (-1, part) for part in name.split(".")]


def finite(content: Any) -> Any:
    """Replace numbers that JSON cannot represent by None: a perplexity can be infinite."""
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write(journal: Journal, out: Path, content: dict[str, Any]) -> None:
    from .page import page  # drawn only where a report is

    content = finite(content)
    journal.write_bytes(out / REPORT_PAGE, page(content).encode())
    journal.write_json(out / REPORT, content)


def read_report(out: Path) -> dict[str, Any]:
    """The report of a run that has ended, its types checked."""
    return require_report(read_json(out / REPORT), str(out / REPORT))


def rebuild(out: str | Path) -> Path:
    """Draw the page again from the report's JSON."""
    from .page import page

    out = Path(out)
    if not (out / REPORT).exists():
        raise FlowError(f"{out}: no {REPORT} there; `baracuda quantize` writes one")
    text = page(read_report(out))
    with os_errors_explained(out, "run it again"):
        _replace(out / REPORT_PAGE, text)
        if (sums := read_manifest(out)) is not None:
            # What the manifest says of all other files stays.
            _replace(out / MANIFEST, encode(sums | digests(out, [REPORT_PAGE])))
        sync_directory(out)
    return out / REPORT_PAGE


def _replace(final: Path, text: str) -> None:
    """Write a file anew: nothing is written through a link that lies in its place, under whatever name."""
    temporary = final.with_name(f".{final.name}.{secrets.token_hex(8)}")
    with temporary.open("x") as file:
        file.write(text)
    temporary.replace(final)
