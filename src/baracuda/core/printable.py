"""Text from files as it may be shown: names in a checkpoint can hold anything, terminals and pages obey some of it."""

from __future__ import annotations

import re

#: Control characters but newline and tab, lone surrogates, and characters that hide text or change its direction.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def printable(text: str) -> str:
    """The text with every character that a terminal or browser would obey instead of showing written as its code."""
    return _UNPRINTABLE.sub(_spelled, text)


def _spelled(found: re.Match[str]) -> str:
    code = ord(found.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
