"""Train what you serve: the trainer's log-probabilities are the rollout's to the last bit.

    python examples/one_answer.py

A small policy learns to write a digit sequence that is worth a reward, with updates in the manner of GRPO: groups of
rollouts, rewards relative to their group, a ratio of new to old probabilities. Rollouts are sampled token by token from
the converted int8 model, as a server would; the trainer then computes the log-probabilities of all tokens in one batch.
With an integer forward both run the same kernel, so before the first update of a step the ratio is exactly 1 and the
divergence between the two engines exactly 0. With ordinary fake-quantization they differ.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import baracuda

VOCABULARY, CONTEXT, WIDTH, LENGTH = 16, 8, 128, 12
PROMPTS, GROUP = 8, 8


class Policy(nn.Module):
    """The next token from the last few: embeddings, side by side, through linears. No row meets another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.up = nn.Linear(CONTEXT * 32, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[rows, VOCABULARY]` from windows of tokens `[rows, CONTEXT]`."""
        with torch.autocast("cpu", torch.bfloat16):
            x = torch.relu(self.up(self.embed(tokens).flatten(1)))
            return self.head(x + torch.relu(self.mix(x))).float()  # type: ignore[no-any-return]


def log_probabilities(policy: nn.Module, windows: Tensor, chosen: Tensor) -> Tensor:
    return policy(windows).log_softmax(-1).gather(-1, chosen[:, None])[:, 0]


@torch.no_grad()
def rollouts(served: nn.Module, prompts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens, and the log-probabilities they were sampled with: one step for the whole batch at a time."""
    tokens, found = prompts, []
    for _ in range(LENGTH):
        logs = served(tokens[:, -CONTEXT:]).log_softmax(-1)
        new = torch.multinomial(logs.exp(), 1, generator=generator)
        found.append(logs.gather(-1, new))
        tokens = torch.cat([tokens, new], 1)
    return tokens, torch.cat(found, 1)


def reward(tokens: Tensor) -> Tensor:
    """How often a token is the one before it plus one."""
    written = tokens[:, -LENGTH - 1 :]
    return ((written[:, 1:] - written[:, :-1]) % VOCABULARY == 1).float().mean(1)


def train(forward: str, steps: int = 40) -> dict[str, Any]:
    """Rewards at the start and the end, and how far the trainer's probabilities were from the rollouts'."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    policy = Policy()
    baracuda.prepare_qat(policy, "w8a8", forward=forward, quantize_head=True)
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    rewards, gaps, divergences = [], [], []
    for _ in range(steps):
        served = copy.deepcopy(policy)
        baracuda.convert(served)
        prompts = torch.randint(VOCABULARY, (PROMPTS, CONTEXT), generator=generator).repeat_interleave(GROUP, 0)
        tokens, old = rollouts(served, prompts, generator)
        worth = reward(tokens)
        groups = worth.view(PROMPTS, GROUP)
        advantage = ((groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()

        windows = tokens.unfold(1, CONTEXT, 1)[:, :LENGTH].reshape(-1, CONTEXT)
        chosen = tokens[:, CONTEXT:].reshape(-1)
        new = log_probabilities(policy, windows, chosen).view_as(old)
        ratio = (new - old).exp()
        gaps.append(float((new - old).detach().abs().max()))
        divergences.append(float((old - new).detach().double().mean()))
        optimizer.zero_grad()
        (-(ratio * advantage[:, None])).mean().backward()
        optimizer.step()
        rewards.append(float(worth.mean()))
    return {
        "first reward": sum(rewards[:5]) / 5,
        "last reward": sum(rewards[-5:]) / 5,
        "largest gap of a log-probability": max(gaps),
        "divergence": max(map(abs, divergences)),
    }


def main() -> dict[str, dict[str, Any]]:
    found = {forward: train(forward) for forward in ("integer", "fake")}
    for forward, numbers in found.items():
        print(f'forward="{forward}"')
        for name, value in numbers.items():
            print(f"  {name}: {value:.3g}")
    return found


if __name__ == "__main__":
    main()
