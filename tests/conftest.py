"""What every test runs under: one thread per worker, and hypothesis with the same examples on every machine."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# Workers of xdist share the cores; a thread pool in each of them only adds waiting.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)

if os.environ.get("TRITON_INTERPRET") == "1":
    from interpreter import make_quick, order_sums

    make_quick()
    order_sums()

settings.register_profile(
    "ci", derandomize=True, database=None, deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", database=None, deadline=None, max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture
def restored() -> Iterator[None]:
    """What a test of the compiled backend may change: the instruction set, the threads, the flag for denormals."""
    from baracuda import _cpu

    isa, threads = _cpu.isa(), torch.get_num_threads()
    yield
    _cpu.use_isa(isa)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


class Failures:
    """Name a failure when it happens: a run that is cut off prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message.splitlines()[0] if crash is not None and crash.message else report.when
            terminal.ensure_newline()
            terminal.write_line(f"failed: {report.nodeid}: {why}"[:400])
            terminal.flush()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Failures(config))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that take minutes and many gigabytes too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs --slow"))
