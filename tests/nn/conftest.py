"""Fixtures of the tests of siblings."""

from merged_attention import computed, inference

__all__ = ["computed", "inference"]
