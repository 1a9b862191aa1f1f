import numpy as np


def sampled_and_scored():
    """Stands for a step of yours: logprobs of an engine and of a trainer, (sequences, length)."""
    rng = np.random.default_rng(0)
    rollout = -rng.exponential(0.3, (64, 200))
    return rollout, np.minimum(rollout + 0.005 * rng.standard_normal(rollout.shape), 0.0)


def test_the_trainer_scores_what_the_engine_sampled(rollproof_gap):
    rollout, trainer = sampled_and_scored()
    ids = np.arange(64).repeat(200)
    report = rollproof_gap(
        rollout.ravel(),
        trainer.ravel(),
        sequence_id=ids,
        mask=np.ones(rollout.size),
        limits="dense-bf16",
    )
    assert report.panel.n_tokens == 12_800
