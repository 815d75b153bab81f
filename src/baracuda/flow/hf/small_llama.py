"""A small Llama that is trained in seconds, for the demo: it has learned a paragraph by heart, word by word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .skeleton import quiet

#: What it learns. A text of its own, so that nothing has to be downloaded.
TEXT = (
    "a scale is a number and a zero point is an integer. divide by the scale, round to even, clamp to the range, store "
    "a byte. what the kernel writes is what the reference says, to the last bit. a token has a scale of its own, so an "
    "outlier in one token does not spoil the next. a channel has one too, and a group of columns shares a third. the "
    "weights are quantized once, the activations each time they pass by. a good report says what was lost, where it "
    "was lost and what to do about it. when a model is too large for the memory of a machine, store its weights in "
    "four bits and keep the rest as it was. when it is too slow, multiply integers instead of floats. measure before "
    "and after, on text that the model has not seen, and believe the numbers. "
)
PROMPT = "a token has"
STEPS, LENGTH, BATCH = 150, 32, 8
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]


def train_small_llama(folder: Path, progress: Callable[[int, int], None] | None = None) -> bool:
    """Train one, and save it with its tokenizer. False where transformers is not installed.

    It gets outlier channels as large models have them: a few channels of each norm are multiplied by 20 and the weights
    that read them divided, which changes no output, but the range that activations are quantized over.
    """
    try:
        import transformers
    except ImportError:
        return False
    torch.manual_seed(0)
    words = _tokenizer(transformers)
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
    )
    model = transformers.LlamaForCausalLM(config)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are tiny: threads would only wait for each other
    try:
        _train(model, torch.tensor(words(TEXT * 2)["input_ids"]), progress or (lambda done, total: None))
    finally:
        torch.set_num_threads(threads)
    _add_outliers(model)
    with quiet():
        model.to(torch.bfloat16).save_pretrained(folder)
        words.save_pretrained(folder)
    return True


def _train(model: Any, corpus: torch.Tensor, progress: Callable[[int, int], None]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=STEPS)
    for step in range(STEPS):
        starts = torch.randint(0, len(corpus) // 2, (BATCH,)).tolist()
        batch = torch.stack([corpus[start : start + LENGTH] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        progress(step + 1, STEPS)
    model.eval()


def _add_outliers(model: Any, factor: float = 20.0, channels: int = 3) -> None:
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            readers: list[tuple[nn.Module, list[nn.Linear]]] = [
                (layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]),
                (layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]),
            ]
            for norm, linears in readers:
                chosen = torch.randperm(model.config.hidden_size)[:channels]
                norm.weight[chosen] *= factor  # type: ignore[index, operator]
                for linear in linears:
                    linear.weight[:, chosen] /= factor


def _tokenizer(transformers: Any) -> Any:
    """A token for each word of the text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    splitter = pre_tokenizers.Whitespace()
    words = [*SPECIAL, *dict.fromkeys(word for word, _ in splitter.pre_tokenize_str(TEXT))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=SPECIAL[0]))
    made.pre_tokenizer = splitter
    named = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=512, clean_up_tokenization_spaces=True, **named
    )
