"""The top-k oracle on routers made for the purpose: what it intercepts, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the oracle intercepts PyTorch's topk")

from rollproof.errors import RouterError  # noqa: E402
from rollproof.replay.hf.topk import intercepted, native_choice, probe  # noqa: E402

EXPERTS, TOP_K, HIDDEN = 6, 2, 5


class Toy(torch.nn.Module):  # type: ignore[misc]
    """A softmax router; ``select`` is how it selects."""

    def __init__(self, select: Any = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(1))
        )
        self.select = select or (lambda scores: torch.topk(scores, TOP_K, dim=-1))

    def forward(self, hidden: Any) -> Any:
        logits = hidden @ self.weight.T
        weights, ids = self.select(logits.softmax(-1))
        return logits, weights, ids


def run(router: Toy, ids: Any, hidden: Any = None) -> Any:
    hidden_states = torch.ones(3, HIDDEN) if hidden is None else hidden
    return intercepted(
        router.forward,
        (hidden_states,),
        {},
        num_experts=EXPERTS,
        top_k=TOP_K,
        choose=lambda _: ids,
        who="The router",
    )


IDS = torch.tensor([[0, 1], [2, 5], [4, 3]])


@pytest.mark.parametrize(
    "select",
    [
        lambda scores: torch.topk(scores, TOP_K),
        lambda scores: torch.topk(scores, k=TOP_K, dim=-1, sorted=False),
        lambda scores: torch.topk(input=scores, k=TOP_K, dim=1),
        lambda scores: scores.topk(TOP_K, dim=-1),
        lambda scores: scores.topk(TOP_K, -1, True, False),
    ],
)
def test_every_way_to_call_topk_is_answered(select: Any) -> None:
    """As a function or a method, by position or by keyword: the ids are the replayed ones, the
    values the live scores at them.
    """
    output, chosen = run(Toy(select), IDS)

    assert chosen is IDS
    assert output[2].tolist() == IDS.tolist()
    assert torch.equal(output[0].softmax(-1).gather(-1, IDS), output[1])


def test_the_gate_has_the_gradient_of_the_selected_scores() -> None:
    """The gradient is that of a gather from the live scores, bit for bit."""
    router = Toy()
    run(router, IDS)[0][1].square().sum().backward()
    gradient, router.weight.grad = router.weight.grad, None
    (torch.ones(3, HIDDEN) @ router.weight.T).softmax(-1).gather(-1, IDS).square().sum().backward()

    assert torch.equal(router.weight.grad, gradient)


@pytest.mark.parametrize(
    ("select", "times"),
    [
        (lambda scores: [part[:, :TOP_K] for part in scores.sort(dim=-1, descending=True)], 0),
        (lambda scores: [part[:, None].expand(-1, TOP_K) for part in scores.max(dim=-1)], 0),
        (lambda scores: torch.topk(scores, TOP_K, largest=False), 0),
        (
            lambda scores: (
                scores.topk(TOP_K + 1)[0][:, :TOP_K],
                scores.topk(TOP_K + 1)[1][:, :TOP_K],
            ),
            0,
        ),
        (lambda scores: (scores.topk(TOP_K).values, scores.topk(TOP_K).indices), 2),
    ],
    ids=["sort", "argmax", "smallest", "another k", "twice"],
)
def test_a_router_that_selects_otherwise_is_refused(select: Any, times: int) -> None:
    """Unless exactly one topk of the right shape is called, nothing is replayed in silence."""
    with pytest.raises(
        RouterError,
        match=rf"The router called torch.topk {times} times on \(rows, 6\) scores with k=2",
    ):
        run(Toy(select), IDS)


def test_a_selection_of_groups_is_left_alone() -> None:
    """A topk over groups, or over experts within groups, is the router's own."""

    def grouped(scores: Any) -> Any:
        best = scores.view(-1, 3, 2).topk(1, dim=-1)[0].squeeze(-1)
        selected = torch.zeros_like(best).scatter_(1, best.topk(TOP_K, dim=-1)[1], 1)
        masked = scores.masked_fill(selected.repeat_interleave(2, dim=1) == 0, float("-inf"))
        ids = masked.topk(TOP_K, dim=-1)[1]
        return scores.gather(-1, ids), ids

    output, _ = run(Toy(grouped), IDS)

    assert output[2].tolist() == IDS.tolist()
    assert bool(torch.isfinite(output[1]).all())


def test_nothing_is_intercepted_outside_of_the_call() -> None:
    """The mode ends with the call, also where the router raises."""
    router = Toy(lambda scores: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(router, IDS)

    assert [] == torch.overrides._get_current_function_mode_stack()
    scores = torch.rand(3, EXPERTS)
    assert torch.equal(scores.topk(TOP_K).indices, native_choice(scores, TOP_K))


def tried(router: Toy, hidden: Any = None) -> bool:
    return tried_with(router.forward, (torch.ones(3, HIDDEN) if hidden is None else hidden,))


def tried_with(forward: Any, args: Any, **kwargs: Any) -> bool:
    return probe(forward, args, kwargs, num_experts=EXPERTS, top_k=TOP_K, who="The router")


def test_other_arguments_of_a_router_are_passed_on() -> None:
    """A bias next to the hidden states is passed on; what goes with the rows, or comes before them,
    is refused.
    """
    router = Toy()
    bias, rows = torch.zeros(EXPERTS), torch.ones(3, HIDDEN)

    assert tried_with(lambda hidden, bias: router(hidden + 0 * bias.sum()), (rows, bias))
    assert tried_with(lambda hidden, bias: router(hidden + 0 * bias.sum()), (rows,), bias=bias)
    with pytest.raises(
        RouterError, match=r"The router cannot be tested on 2 rows, .* RuntimeError"
    ):
        tried_with(lambda hidden, other: router(hidden + other), (rows, rows))
    for args in ((), (IDS,), (None, rows)):
        with pytest.raises(RouterError, match="is not called with hidden states first"):
            tried_with(lambda *_: None, args)


def test_a_sound_router_passes_the_trial_and_does_not_notice() -> None:
    """The trial draws no random number and leaves no gradient."""
    router, before = Toy(), torch.get_rng_state()

    assert tried(router)
    assert torch.equal(before, torch.get_rng_state())
    assert router.weight.grad is None


def test_weights_of_masked_scores_are_found_in_the_trial() -> None:
    """A router that masks groups by 0 and takes weights from there switches off what it would not
    choose itself: it is refused.
    """

    def masked(scores: Any) -> Any:
        return scores.masked_fill(scores < scores.median(dim=-1, keepdim=True).values, 0.0).topk(
            TOP_K, dim=-1
        )

    with pytest.raises(
        RouterError,
        match="masks scores before its top-k and takes the weights from the masked ones",
    ):
        tried(Toy(masked))


def test_nan_weights_prove_nothing() -> None:
    """A router with NaN in its weights is neither refused for it nor taken for proven."""
    router = Toy()
    torch.nn.init.constant_(router.weight, float("nan"))

    assert not tried(router)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scores, weights, ids: (weights, weights), "no expert ids of shape"),
        (lambda scores, weights, ids: (ids, ids), "no weights of shape"),
        (lambda scores, weights, ids: (weights, (ids + 1) % EXPERTS), "but executes"),
    ],
    ids=["no ids", "no weights", "other ids"],
)
def test_a_router_that_does_not_show_what_it_executes_is_refused(change: Any, message: str) -> None:
    """What cannot be observed cannot be promised."""

    def select(scores: Any) -> Any:
        return change(scores, *scores.topk(TOP_K, dim=-1))

    with pytest.raises(RouterError, match=message):
        tried(Toy(select))
