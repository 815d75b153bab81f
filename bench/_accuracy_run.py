"""One row of `bench accuracy`: quantize a model as a JSON object says, and print what it took."""

from __future__ import annotations

import json
import resource
import sys
import time

import torch

from baracuda.flow import quantize_checkpoint


def main(task: str) -> None:
    chosen = json.loads(task)
    started = time.perf_counter()
    quantize_checkpoint(chosen.pop("model"), chosen.pop("out"), **chosen)
    seconds = time.perf_counter() - started
    used = resource.getrusage(resource.RUSAGE_SELF)
    cost = {"seconds": seconds, "cpu_seconds": used.ru_utime + used.ru_stime, "peak_mb": used.ru_maxrss / 1024}
    print(json.dumps({**cost, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main(sys.argv[1])
