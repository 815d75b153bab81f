"""A tour for people who serve: a checkpoint becomes int8, is checked, loaded, and writes.

    python examples/tour_serving.py

Plain Python in cells: editors that know `# %%` run it piece by piece. Under a minute on two cores; needs transformers
(pip install 'baracuda[flow]'). The model is a tiny Llama trained here for seconds, byte by byte, on a few sentences, so
that it has something to say.
"""

# %% A model directory, as it comes from a hub: config.json and safetensors.
import tempfile
from pathlib import Path

import torch
import transformers

import baracuda
from baracuda.flow import quantize_checkpoint, verify
from baracuda.flow.checkpoint.tensorfile import write_tensors

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.manual_seed(0)
torch.set_num_threads(1)  # the matrices are tiny: threads would only wait for each other
folder = Path(tempfile.mkdtemp(prefix="baracuda-tour-"))
text = (
    "a scale is a number, a zero point is an integer. round to even, clamp to the range, store a byte. "
    "what the kernel writes is what the reference says, to the last bit. "
)


def heading(title: str) -> None:
    print(f"\n== {title}")


def as_tokens(words: str) -> torch.Tensor:
    return torch.tensor(list(words.encode()))


# %% Train it: next byte from the bytes before.
heading("A small model with something to say")
config = transformers.LlamaConfig(
    vocab_size=128, hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
model = transformers.LlamaForCausalLM(config)
corpus = as_tokens(text * 40)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(100):
    starts = torch.randint(0, len(corpus) - 64, (8,))
    batch = torch.stack([corpus[s : s + 64] for s in starts.tolist()])
    loss = model(input_ids=batch, labels=batch).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval().save_pretrained(folder / "model")
print(f"trained to a loss of {loss.item():.2f}; saved in {folder / 'model'}")

# %% Quantize: W8A8 with SmoothQuant, calibrated and measured on tokens. The command line does the same:
#    baracuda quantize MODEL -o OUT --scheme w8a8-smoothquant --calibration tokens.safetensors --evaluate ...
heading("baracuda quantize")
tokens = folder / "tokens.safetensors"
write_tensors(tokens, {"tokens": corpus[: 16 * 64].view(16, 64)})
report = quantize_checkpoint(
    folder / "model", folder / "int8", scheme="w8a8-smoothquant", calibration=tokens, evaluation=tokens
)
size, quality = report["size"], report["evaluation"]
print(f"{len(report['layers'])} Linears in int8, {len(report['left'])} left in float: "
      f"{size['before'] / 1e6:.2f} MB -> {size['after'] / 1e6:.2f} MB")  # fmt: skip
print(f"against the float model: the same most likely byte in {quality['top1_agreement']:.1%} of places, "
      f"KL divergence {quality['kl']:.1e}")  # fmt: skip
worst = min(report["layers"], key=lambda layer: layer["sqnr_db"])
print(f"the layer that lost most: {worst['name']}, {worst['sqnr_db']:.1f} dB of signal over noise")

# %% Verify: every tensor, scale and setting a server relies on; and that a damaged file is noticed.
heading("baracuda verify")
findings = verify(folder / "int8", against=folder / "model")
print(f"the result: {len(findings)} findings")
assert not findings
damaged = folder / "damaged"
damaged.mkdir()
for path in (folder / "int8").iterdir():
    (damaged / path.name).write_bytes(path.read_bytes())
weights = damaged / "model.safetensors"
weights.write_bytes(weights.read_bytes()[:-1000])
found = verify(damaged)
print(f"a copy that lost its last 1000 bytes: {found[0].code}: {found[0].message}")

# %% Load and generate, in int8, on this CPU; compare with the float model, word for word.
heading("baracuda.load, and a sentence")
served = baracuda.load(folder / "int8")
kinds = sorted({type(m).__name__ for m in served.modules() if type(m).__module__.startswith("baracuda")})
prompt = as_tokens("what the kernel")[None]


def complete(writer: torch.nn.Module) -> str:
    done = writer.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=48, do_sample=False)
    return bytes(done[0].tolist()).decode(errors="replace")


said = {"float": complete(model), "int8": complete(served)}
for name, words in said.items():
    print(f"{name:6} {words!r}")
print(f"served by {', '.join(kinds)}; the same sentence: {said['float'] == said['int8']}")
print(f"all of it is in {folder}")
