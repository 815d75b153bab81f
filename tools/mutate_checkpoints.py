"""Change single bytes of quantized checkpoints, and see what `baracuda verify` lets pass.

Each change is tried as it is, without the original, and with the checksums renewed by somebody who wants it to go
unnoticed, against the original. The bar: as it is, nothing passes. With renewed checksums and the original, nothing
passes that moves a logit by more than 1e-3 of their size. What only the calibration data or the method's own run could
tell (input scales; the integers and scales of GPTQ) is counted apart.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import models
import torch

from baracuda.flow import load, quantize_checkpoint, verify
from baracuda.flow.checkpoint.manifest import files_in, for_people
from baracuda.flow.checkpoint.tensorfile import TensorFile

BAR = 1e-3
#: A checkpoint with several config groups: integers of 8 and 4 bits, and packed weights beside float activations.
RECIPE = {
    "scheme": "w4a16",
    "group_size": 32,
    "layers": [{"match": "*.mlp.*", "scheme": "w8a8"}, {"match": "*.o_proj", "scheme": "w4a8"}],
}
SCHEMES: dict[str, dict[str, Any]] = {
    "w8a8": {},
    "w8a8-static": {"scheme": "w8a8-static"},
    "w8a8 smoothed": {"smooth": True},
    "w8a8 smoothed, static": {"scheme": "w8a8-smoothquant", "activations": "static"},
    "w4a16": {"scheme": "w4a16", "group_size": 32},
    "w4a8": {"scheme": "w4a8", "group_size": 32},
    "recipe": {"recipe": RECIPE},
    "w4a16 gptq": {"scheme": "w4a16", "group_size": 32, "method": "gptq"},
}
#: Schemes that are made with calibration data.
CALIBRATED = ("static", "smoothed", "gptq")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scheme", choices=SCHEMES, action="append", help="this one; all of them unless given")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        models.save("qwen2", place / "model", torch.bfloat16)
        (place / "model" / "tokenizer.json").write_text('{"a": 1, "b": [2, 3]}')
        tokens = models.tokens(place / "tokens.safetensors")
        for name in options.scheme or SCHEMES:
            scheme = SCHEMES[name]
            needs = {"calibration": tokens} if any(word in name for word in CALIBRATED) else {}
            quantize_checkpoint(place / "model", place / "out", **scheme, **needs)
            assert verify(place / "out", place / "model") == [], name
            counts, slips = mutate(place, options, gptq="gptq" in name)
            counts["slipped"] = len(slips)
            print(f"{name}: {dict(counts)}", flush=True)
            for slip in slips:
                print(f"  slipped: {slip}")
            failures += len(slips)
            shutil.rmtree(place / "out")
    return 1 if failures else 0


def mutate(place: Path, options: argparse.Namespace, *, gptq: bool) -> tuple[Counter[str], list[str]]:
    out, source = place / "out", place / "model"
    chance = random.Random(options.seed)
    names = [name for name in files_in(out) if not for_people(name)]
    exact = logits(out)
    assert exact is not None
    counts, slips = Counter[str](), []
    with TensorFile(out / "model.safetensors") as file:
        entries, start = dict(file.entries), file.data_start
    for _ in range(options.changes):
        # Half of the changes go to the weights, the others to each file alike.
        name = "model.safetensors" if chance.random() < 0.5 else chance.choice(names)
        path = out / name
        whole = path.read_bytes()
        at = chance.randrange(len(whole))
        where = f"{name} byte {at}"
        if name == "model.safetensors" and at >= start:
            where = next(e.name for e in entries.values() if e.start <= at - start < e.end)
        path.write_bytes(whole[:at] + bytes((whole[at] ^ (1 << chance.randrange(8)),)) + whole[at + 1 :])
        kept = (out / "baracuda.sha256").read_bytes()
        counts["changes"] += 1
        if not verify(out):
            counts["passed as it is"] += 1
            slips.append(f"{where}: not found by its checksum")
        if name != "baracuda.sha256":
            models.reseal(out)
            if not verify(out, source):
                counts["resealed, with the original"] += 1
                moved = distance(exact, logits(out))
                if moved > BAR:
                    chosen = ("weight_packed", "weight_scale") if gptq else ()
                    apart = where.endswith(("input_scale", *chosen))
                    counts["resealed, with the original, moved"] += 1
                    if not apart:
                        slips.append(f"{where}: resealed, it moved the logits by {moved:.1e}")
        path.write_bytes(whole)
        (out / "baracuda.sha256").write_bytes(kept if name != "baracuda.sha256" else whole)
    return counts, slips


def logits(out: Path) -> torch.Tensor | None:
    try:
        model = load(out)
        with torch.no_grad():
            found: torch.Tensor = model(input_ids=models.prompt()).logits.float()
        return found
    except Exception:  # what passes verify and cannot be loaded has moved its logits, too
        return None


def distance(exact: torch.Tensor, found: torch.Tensor | None) -> float:
    if found is None or found.shape != exact.shape or not bool(torch.isfinite(found).all()):
        return float("inf")
    return float((found - exact).abs().max() / exact.abs().max())


if __name__ == "__main__":
    sys.exit(main())
