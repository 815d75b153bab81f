"""How `baracuda eval` shows what it measured."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table


def figures(found: dict[str, Any]) -> Table:
    """What was measured, a figure a row."""
    rows = Table("", "", box=SIMPLE_HEAD, show_header=False)
    rows.add_row("tokens", str(found["tokens"]))
    perplexity = found.get("perplexity")
    if isinstance(perplexity, dict):
        rows.add_row("perplexity, float", f"{perplexity['float']:.3f}")
        rows.add_row("perplexity, quantized", f"{perplexity['quantized']:.3f}")
    elif perplexity is not None:
        rows.add_row("perplexity", f"{perplexity:.3f}")
    if "kl" in found:
        rows.add_row("KL divergence", f"{found['kl']:.5f}")
        rows.add_row("same most likely token", f"{100 * found['top1_agreement']:.2f} %")
    if "cosine" in found:
        rows.add_row("cosine, mean", f"{found['cosine']['mean']:.5f}")
    for token in found.get("worst", [])[:3]:
        where = f"sequence {token['sequence']}, token {token['position']}"
        context = f"...{token['before'][-40:]!r} -> {token['text']!r}" if token.get("before") else ""
        rows.add_row("worst token", escape(f"KL {token['kl']:.3f}, {where} {context}"))
    noisy = sorted((db, name) for name, db in found.get("layers", {}).items() if db is not None)
    for db, name in noisy[:3]:
        rows.add_row("noisiest layer", escape(f"{name}: {db:.1f} dB"))
    return rows
