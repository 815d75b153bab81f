"""A tour for people who train: fake-quantization that is the real rounding, learned scales, and what bits cost.

    python examples/tour_training.py

Plain Python in cells: editors that know `# %%` run it piece by piece. Under a minute on two cores.
"""

# %% The data and the training loop are those of qat_digits.py, next to this file: scikit-learn's 8x8 digits.
import copy

import torch
from qat_digits import accuracy, data, fit
from torch import nn

import baracuda
from baracuda import LinearScheme, PerTensor
from baracuda.nn import FakeQuantize

torch.manual_seed(0)
torch.set_num_threads(1)  # the matrices are tiny: threads would only wait for each other
x, y, x_test, y_test = data()


def heading(text: str) -> None:
    print(f"\n== {text}")


# %% Fake-quantization is quantize and dequantize in one pass: the same bits, so what you train is what you serve.
heading("Fake is real")
w, scale = torch.randn(64, 64), torch.tensor(0.03)
fake = baracuda.fake_quantize(w, scale)
real = baracuda.dequantize(baracuda.quantize(w, scale), scale)
assert torch.equal(fake, real)
print("fake_quantize(w) has the bits of dequantize(quantize(w)): 4096 of 4096 values")

# %% Its gradient passes where x was in range and stops where it was clipped.
w.requires_grad_()
baracuda.fake_quantize(w, torch.tensor(0.01)).sum().backward()
assert w.grad is not None
clipped = int((w.grad == 0).sum())
print(
    f"at a scale of 0.01, {clipped} of 4096 values are clipped to the range's ends: their gradient is 0, the others' 1"
)

# %% A learned scale (LSQ): the scale is a parameter, and its gradient pulls it to where the error is least.
heading("A scale that learns")
heavy = torch.randn(4096) * torch.where(torch.rand(4096) < 0.01, 8.0, 1.0)
learned = FakeQuantize("learned", PerTensor(), element="s4")
learned(heavy)  # the first batch initialises the scale
optimizer = torch.optim.Adam(learned.parameters(), lr=0.02)
first = nn.functional.mse_loss(learned(heavy), heavy).item()
for _ in range(150):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(learned(heavy), heavy)
    loss.backward()
    optimizer.step()
by_range = baracuda.choose_qparams(heavy, scope=PerTensor(), dtype="s4")[0]
from_range = nn.functional.mse_loss(baracuda.fake_quantize(heavy, by_range, q_min=-7, q_max=7), heavy).item()
print(f"4 bits for a heavy-tailed tensor, mean squared error: {from_range:.3f} with the scale of its largest value,")
print(f"{first:.3f} with LSQ's first guess, {loss.item():.3f} after 150 steps (scale {learned.scale.item():.3f})")

# %% A model: train in float, then see what rounding to fewer and fewer bits does without and with training for it.
heading("What bits cost, and what training wins back")
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
fit(model, x, y, 25, 3e-3)
print(f"{'weights / activations':24} {'rounded':>9} {'trained for it':>15}")
print(f"{'float':24} {accuracy(model, x_test, y_test):9.1%}")
schemes = {
    "8 bits / 8 bits": LinearScheme(),
    "4 bits / 8 bits": LinearScheme(weight="s4"),
    "4 bits / 3 levels": LinearScheme(weight="s4", activation="u8", mode="asymmetric", q_min=0, q_max=2),
}
for name, scheme in schemes.items():
    rounded, trained = copy.deepcopy(model), copy.deepcopy(model)
    baracuda.quantize_model(rounded, scheme)
    baracuda.prepare_qat(trained, scheme)
    fit(trained.train(), x, y, 15, 3e-3)
    with_training = accuracy(trained, x_test, y_test)
    print(f"{name:24} {accuracy(rounded, x_test, y_test):9.1%} {with_training:15.1%}")

# %% Converting puts integers in place of the fake ones, and says for every layer what became of it.
heading("From training to integers")
report = baracuda.convert(trained)
print(report)
print(f"accuracy before converting {with_training:.1%}, after {accuracy(trained, x_test, y_test):.1%}")
