"""Processes that take the machine's time, to see what becomes of a measurement beside them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: Neighbours of the measurement, each of which fills a core.
COUNT = 2
_CODE = "print(flush=True)\nwhile True: pass"


@contextmanager
def neighbours(count: int = COUNT) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many processes that compute without an end, for as long as it is in use."""
    started = [subprocess.Popen([sys.executable, "-c", _CODE], stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()  # it has begun
        time.sleep(0.2)  # the system spreads them over the cores
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
