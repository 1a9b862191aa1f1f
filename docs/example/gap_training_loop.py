"""A training loop of one's own that measures its gap at every step: the ten lines at the end are what it takes."""

from __future__ import annotations

from typing import Any

import torch

from rollproof.gap import measure

BATCH, LENGTH, VOCABULARY = 32, 24, 50


class Policy(torch.nn.Module):
    """A model small enough to read: each token's logits come from the token before it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(
            torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
        )

    def forward(self, ids: Any) -> Any:
        return torch.log_softmax(self.table[ids], -1)


def rollout(policy: Policy, seed: int) -> tuple[Any, Any, Any]:
    """Ids ``(batch, length + 1)``, the engine's logprobs and the response mask ``(batch, length)``: an engine that computes in bf16."""
    random, ids, logprobs = (
        torch.Generator().manual_seed(seed),
        torch.zeros(BATCH, 1, dtype=torch.int64),
        [],
    )
    with torch.no_grad():
        for _ in range(LENGTH):
            law = torch.log_softmax(policy.table.bfloat16()[ids[:, -1]].float(), -1)
            ids = torch.cat([ids, torch.multinomial(law.exp(), 1, generator=random)], 1)
            logprobs.append(law.gather(1, ids[:, -1:]))
    mask = torch.arange(LENGTH)[None] < torch.randint(4, LENGTH, (BATCH, 1), generator=random)
    return ids, torch.cat(logprobs, 1), mask


def train(steps: int = 3) -> list[dict[str, float]]:
    """Plain policy gradient, and what a logger would get of each step."""
    policy, logged = Policy(), []
    optimiser = torch.optim.Adam(policy.parameters(), lr=0.01)
    for step in range(steps):
        ids, rollout_logprobs, response_mask = rollout(policy, seed=step)
        trainer_logprobs = policy(ids[:, :-1]).gather(2, ids[:, 1:, None])[..., 0]
        report = measure(
            rollout_logprobs.flatten(),  # (batch, length) tensors on the CPU, in float32 or better
            trainer_logprobs.detach().flatten(),
            sequence_id=torch.arange(BATCH).repeat_interleave(LENGTH),
            mask=response_mask.flatten(),
            limits="dense-bf16",
        )
        logged.append(report.aliased())  # names that verl, NeMo-RL, slime, TRL and SkyRL log
        if report.verdict == "fail":
            raise RuntimeError(f"step {step}: {report.causes[0].name}: {report.causes[0].advice}")
        advantage = (ids[:, 1:] == 7).float() - 1 / VOCABULARY
        optimiser.zero_grad()
        (-(trainer_logprobs * advantage * response_mask).sum() / response_mask.sum()).backward()
        optimiser.step()
    return logged


if __name__ == "__main__":
    for row in train():
        print(  # noqa: T201 - a program for reading
            f"k3 {row['gen_kl_error']:.2e}  mean |d| {row['sampling/sampling_logp_difference/mean']:.4f}"
        )
