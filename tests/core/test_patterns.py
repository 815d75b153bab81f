"""Patterns over names: what they match, and which of them a stranger may not give."""

from __future__ import annotations

import fnmatch
import re
import time
from math import inf

import pytest

from baracuda.core.patterns import MAX_STEPS, matches, steps

NAMES = [f"model.layers.{i}.mlp.experts.{j}.down_proj" for i in range(40) for j in range(40)]

QUICK = [
    r"re:.*q_proj$",
    r"re:.*self_attn.*proj.*",
    r"re:^model\.layers\.\d+\.mlp\.experts(\..*)?$",
    r"re:^model\.layers\.(?:1|13|7)\.mlp\.(?:gate_proj|up_proj|gate_up_proj)$",
    r"re:(?!.*(foo|bar)).*",
    f"re:{fnmatch.translate('*.mlp.*up*')}",
    "*.mlp.*.*.*.*",
    "lm_head",
]
SLOW = [
    r"re:(.*)*x",
    r"re:(.*)*(.*)*(.*)*!$",
    r"re:(a|aa)*c",
    r"re:(a?){30}a{30}",
    r"re:(?:a{0,9}){9}b",
    r"re:(\d+)*\.",
    r"re:(.*a){20}",
    r"re:.*.*.*.*.*.*.*.*x",
    "re:" + "a?" * 30 + "a{30}",
    r"re:(?:x*)*+y",
    "re:" + "(?:" * 900 + "a" + ")*" * 900,
]


@pytest.mark.parametrize("pattern", QUICK)
def test_patterns_that_people_write_are_quick(pattern: str) -> None:
    assert steps([pattern] * 10, NAMES) < MAX_STEPS
    start = time.perf_counter()
    for name in NAMES:
        matches(pattern, name)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("pattern", SLOW)
def test_patterns_that_may_never_end_are_known_before_they_are_matched(pattern: str) -> None:
    assert steps([pattern], ["a" * 500] * 100) > MAX_STEPS


def test_one_repetition_inside_another_has_no_bound() -> None:
    assert steps(["re:(.*)*x"], ["a"]) == inf and steps(["re:.*.*x", "*", "name"], ["a" * 500]) == 0


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "xlm_head", False),
        ("*.mlp.*", "a.mlp.b", True),
        ("a?c", "abc", True),
        ("a[bc]", "ab", True),
        ("a[bc]", "a[bc]", True),
        ("re:a.c", "abcd", True),
        ("re:b", "ab", False),
        ("a.c", "abc", False),
    ],
)
def test_matches(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


def test_more_patterns_than_python_remembers_are_compiled_once() -> None:
    """Python keeps 512 compiled expressions and forgets them all when there are more."""
    patterns = [rf"re:^model\.layers\.{i}\.mlp\.\w+_proj$" for i in range(1000)]
    re.purge()
    start = time.process_time()
    for name in NAMES[:100]:
        assert sum(matches(pattern, name) for pattern in patterns) <= 1
    assert time.process_time() - start < 8
