"""Attention of transformers models: our function in the place of torch's in transformers' table."""

from __future__ import annotations

from ...nn.attention import marked


def install() -> None:
    """Once. The name stays "sdpa": models compare it, and build masks and choose caches by it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    theirs = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if not hasattr(theirs, "theirs"):
        ALL_ATTENTION_FUNCTIONS.register("sdpa", marked(theirs))
