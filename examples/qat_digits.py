"""Handwritten digits in few bits: float, quantized after training, and trained for quantization, side by side.

    python examples/qat_digits.py

A small MLP on scikit-learn's 8x8 digits. Four bits for weights and three levels for activations is harsh on purpose:
rounding a trained model that far costs accuracy, and training with the rounding in place wins most of it back.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import baracuda
from baracuda import DynamicRangeMode, ElementKind, LinearScheme

SCHEME = LinearScheme(
    weight=ElementKind.S4, activation=ElementKind.U8, mode=DynamicRangeMode.ASYMMETRIC, q_min=0, q_max=2
)


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train and test images with their labels; a fifth is kept for testing."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    return images[train], labels[train], images[test], labels[test]


def fit(model: nn.Module, x: Tensor, y: Tensor, epochs: int, lr: float) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    generator = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        schedule.step()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(x).argmax(dim=1) == y).float().mean())


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    start = time.perf_counter()
    x, y, x_test, y_test = data()
    sizes = [64, 64, 64, 64, 10]
    layers = [nn.Sequential(nn.Linear(k, n), nn.ReLU()) for k, n in itertools.pairwise(sizes[:-1])]
    model = nn.Sequential(*layers, nn.Linear(*sizes[-2:]))
    fit(model, x, y, options.epochs, 3e-3)

    rounded = copy.deepcopy(model)
    baracuda.quantize_model(rounded, SCHEME)

    trained = copy.deepcopy(model)
    baracuda.prepare_qat(trained, SCHEME)
    fit(trained.train(), x, y, options.epochs, 5e-3)
    results = {
        "float": accuracy(model, x_test, y_test),
        "ptq": accuracy(rounded, x_test, y_test),
        "qat": accuracy(trained, x_test, y_test),
    }
    report = baracuda.convert(trained)
    results["converted"] = accuracy(trained, x_test, y_test)

    print(report)
    print(f"\n{'4-bit W, 3-level A':28} test accuracy")
    for name, text in {
        "float": "float",
        "ptq": "quantized after training",
        "qat": "QAT, fake-quantized",
        "converted": "QAT, converted to integers",
    }.items():
        print(f"{text:28} {results[name]:.1%}")
    print(f"\n{time.perf_counter() - start:.1f} s")
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)  # the matrices are tiny: threads would only wait for each other
    main()
