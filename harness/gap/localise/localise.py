"""Localising: the module at which two forwards of the same tokens part by more than rounding, and
how the difference grows.

The second model is run *led*: every site's output is taken down, and then replaced by the first
model's, so that each module gets the first model's values and shows what it alone does differently;
what a fault does to the layers behind it is taken out, and so are the flips of routers. How far the
two are apart without that is measured beside it, layer by layer.

What rounding may do is measured at every site, for every token: by the first model in float64 (its
own rounding), and by the first model in the second's precision (the other's). A site parts where
tokens are apart by more than ``BEYOND`` times that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import optimize

from rollproof.errors import GapError
from rollproof.gap.localise.localisation import FEW, Localisation, SiteGap
from rollproof.gap.localise.sites import Site
from rollproof.gap.token_pairs import BoolArray, FloatArray

if TYPE_CHECKING:
    from rollproof.gap.localise.forwards import Forward

__all__ = ["BEYOND", "localise"]

BEYOND = 2.0
"""Times the roundings of both sides added up. Sides that differ by rounding alone show a quarter to
a half of that sum (six families of models, three precisions, other kernels and batches), so this is
four to eight times what they show."""


def localise(
    first: Any,
    second: Any,
    input_ids: Any = None,
    attention_mask: Any = None,
    *,
    led: bool = True,
    replay: bool = True,
    reruns: Sequence[Forward] = (),
    names: tuple[str, str] = ("first", "second"),
) -> Localisation:
    """Where ``first`` and ``second`` part. Each is a ``Forward``, or a model of HF transformers
    that is run over ``input_ids``.

    ``first`` is the side that is trusted and that can be copied: it is run in float64 and in the
    second's precision to tell what rounding does. ``reruns`` are further forwards of it whose
    differences count as rounding (another batch, another kernel), and the only ones where its model
    cannot be copied. ``led=False`` is for a second side whose outputs must not be replaced (a
    compiled graph); ``replay`` also runs the second side with the first's experts, where it can.
    Some hundred tokens are enough. Raises ``GapError`` where the sides do not hold the same number
    of tokens or have no site in common. Needs torch.
    """
    import torch

    one, two = (
        _side(side, input_ids, attention_mask, name)
        for side, name in zip((first, second), names, strict=True)
    )
    if len(one.rows) != len(two.rows):
        raise GapError(
            f"{one.name} compares {len(one.rows)} tokens and {two.name} {len(two.rows)}: both must"
            " run the same ones."
        )
    if not len(one.rows):
        raise GapError("There are no tokens to compare.")
    with torch.no_grad():
        base = _Base(one)
        if not base.values:
            raise GapError(
                f"No module of {one.name} has rows of the {one.size} tokens: is size the number of"
                " rows that it runs?"
            )
        alone = base.errors(two, led=led)
        strangers = tuple(base.strangers)
        rounding = _Rounding(base, one, two, reruns, frozenset(alone))
        carried = alone if not led else base.errors(two, led=False)
        replayed = (
            base.errors(two, led=False, replay=True)
            if replay and two.replay is not None and base.routes is not None
            else {}
        )
    unit = max(torch.finfo(kind).eps / 2 for kind in (one.dtype, two.dtype))
    sites = [
        _judged(base, site, alone[site], rounding, unit, led, carried, replayed)
        for site in base.values
        if site in alone
    ]
    if not sites:
        raise GapError(
            f"{one.name} and {two.name} have no site in common; the first's are"
            f" {', '.join(map(str, list(base.values)[:8]))}."
        )
    lacking = [str(site) for site in base.values if site not in alone]
    return Localisation(
        first=one.name,
        second=two.name,
        n_tokens=len(one.rows),
        sites=tuple(sites),
        unmatched=tuple(
            lacking + [f"{name} (second)" for name in strangers if name not in lacking]
        ),
        led=led,
        replayed=bool(replayed),
    )


def _side(side: Any, input_ids: Any, attention_mask: Any, name: str) -> Forward:
    from rollproof.gap.localise.forwards import Forward, hf_forward

    if isinstance(side, Forward):
        return side
    if not hasattr(side, "named_modules"):
        raise GapError(
            f"The {name} side must be a Forward or a model of torch, not {type(side).__name__}."
        )
    if input_ids is None:
        raise GapError(
            "Two models need input_ids (batch, width) to be run over; or give a Forward each."
        )
    return hf_forward(side, input_ids, attention_mask, name=f"{name} ({type(side).__name__})")


class _Base:
    """The first side: its values at every site, which all other runs are compared with as they go,
    site by site.
    """

    def __init__(self, forward: Forward) -> None:
        from rollproof.gap.localise.forwards import heard

        self.forward = forward
        self.values: dict[Site, Any] = {}
        with heard(forward, self._keep) as taps:
            forward.run(forward.model)
        self.modules = _modules(taps)
        self.other: dict[Site, str] = {}
        self.strangers: list[str] = []
        self.routes = self._routes()

    def _keep(self, site: Site, values: Any) -> None:
        self.values[site] = values.clone()

    def _routes(self) -> Any:
        """``(size, MoE layers, top_k)`` ids of the first side; ``None`` without routers. Rows that
        are not compared are free (-1).
        """
        import torch

        chosen = [self.values[site] for site in self.values if site.role == "selection"]
        if not chosen:
            return None
        top_k = int(chosen[0].sum(dim=1).max())
        return torch.stack(
            [
                torch.argsort(c.to(torch.int8), dim=1, descending=True, stable=True)[:, :top_k]
                for c in chosen
            ],
            dim=1,
        )

    def size_of(self, site: Site) -> float:
        """Root mean square over tokens of the norm of the site's values."""
        return float(self.values[site].double().pow(2).sum(dim=1).mean().sqrt())

    def norms(self, site: Site) -> FloatArray:
        return np.asarray(self.values[site].double().norm(dim=1).cpu().numpy())

    def errors(
        self,
        forward: Forward,
        *,
        led: bool,
        replay: bool = False,
        only: frozenset[Site] | None = None,
    ) -> dict[Site, FloatArray]:
        """``(tokens,)`` at each common site: the norm of what ``forward`` has there less what the
        first side has.

        ``only`` are the sites that are led and compared (default: all): where the second side lacks
        one, its block rounds as a whole.
        """
        from rollproof.gap.localise.forwards import heard

        found: dict[Site, FloatArray] = {}
        self.strangers = []

        def visit(site: Site, values: Any) -> Any:
            mine = self.values.get(site)
            if mine is None or mine.shape != values.shape:
                self.strangers.append(str(site))
                return None
            if only is not None and site not in only:
                return None
            mine = mine.to(values.device)
            if site.role == "selection":
                found[site] = np.asarray((mine != values).any(dim=1).double().cpu().numpy())
                return mine if led else None
            apart = (values.double() - mine.double()).norm(dim=1)
            if site.role == "gates":  # where other experts were chosen, weights are not comparable
                apart = apart * _same(found, site, apart)
            found[site] = np.asarray(apart.cpu().numpy())
            return mine if led else None

        with self._replaying(forward) if replay else nullcontext(), heard(forward, visit) as taps:
            forward.run(forward.model)
        names = _modules(taps)
        if not self.other or forward.model is not self.forward.model:
            self.other = names
        return found

    def _replaying(self, forward: Forward) -> Any:
        import torch

        if forward.replay is None or self.routes is None:
            return nullcontext()
        routes = torch.full((forward.size, *self.routes.shape[1:]), -1, dtype=torch.int64)
        routes[torch.from_numpy(np.ascontiguousarray(forward.rows))] = self.routes.cpu()
        return forward.replay(forward.model, routes)


def _same(found: Mapping[Site, FloatArray], site: Site, like: Any) -> Any:
    """1 for tokens whose experts are the same on both sides."""
    flipped = found.get(Site(layer=site.layer, role="selection"))
    return 1.0 if flipped is None else like.new_tensor(1.0 - flipped)


def _modules(taps: Mapping[str, Any]) -> dict[Site, str]:
    out: dict[Site, str] = {}
    for name, tap in taps.items():
        for site in tap.columns:
            out.setdefault(site, name)
        if tap.before is not None:
            out[tap.before] = f"before {name}"
        if tap.router:
            for role in ("selection", "gates"):
                out[Site(layer=tap.site.layer, role=role)] = name
    return out


class _Rounding:
    """What rounding does at each site to each token: led, and carried."""

    def __init__(
        self,
        base: _Base,
        one: Forward,
        two: Forward,
        reruns: Sequence[Forward],
        shared: frozenset[Site],
    ) -> None:
        import torch

        self.led: list[dict[Site, FloatArray]] = []
        self.carried: list[dict[Site, FloatArray]] = []
        others = list(reruns)
        if not others:
            kinds = [torch.float64] + [two.dtype] * (two.dtype is not one.dtype)
            others = [one.recast(kind) for kind in kinds]
        for other in others:
            self.led.append(base.errors(other, led=True, only=shared))
            self.carried.append(base.errors(other, led=False, only=shared))
        if len(others) == 1 and not reruns:  # both sides round alike
            self.led *= 2
            self.carried *= 2

    def of(self, runs: Sequence[Mapping[Site, FloatArray]], site: Site, tokens: int) -> FloatArray:
        """``(tokens,)``: the sum over the runs, since each side rounds on its own."""
        return np.asarray(sum((run[site] for run in runs if site in run), np.zeros(tokens)))


def _judged(
    base: _Base,
    site: Site,
    apart: FloatArray,
    rounding: _Rounding,
    unit: float,
    led: bool,
    carried: Mapping[Site, FloatArray],
    replayed: Mapping[Site, FloatArray],
) -> SiteGap:
    tokens = len(apart)
    scale = base.size_of(site) or 1.0
    floor = rounding.of(rounding.led if led else rounding.carried, site, tokens)
    experts: tuple[int, ...] = ()
    if site.role == "selection":
        flips, allowed = int(apart.sum()), BEYOND * (1 + int(floor.sum()))
        count, beyond = (flips if flips > allowed else 0), flips / allowed
        scale, noise = 1.0, floor
    else:
        # a token whose own rounding happened to be small has that of its neighbours
        noise = np.maximum(floor, np.quantile(floor, 0.9)) + unit * base.norms(site)
        out: BoolArray = ~(apart <= BEYOND * noise)  # NaN is beyond
        count = int(out.sum())
        with np.errstate(invalid="ignore", divide="ignore"):
            beyond = (
                float(np.median(apart[out] / noise[out]))
                if count
                else float(np.median(apart / noise))
            )
        if site.role in ("experts", "mlp") and count >= FEW:
            experts = _experts(base, site.layer, apart, noise)

    def size(errors: Mapping[Site, FloatArray]) -> float:
        return (
            float(np.sqrt(np.mean(errors[site] ** 2)) / scale) if site in errors else float("nan")
        )

    natural = rounding.of(rounding.carried, site, tokens)
    return SiteGap(
        site=site,
        module=base.modules.get(site, str(site)),
        other_module=base.other.get(site, str(site)),
        alone=float(np.sqrt(np.mean(apart**2)) / scale),
        rounding=float(np.sqrt(np.mean(noise**2)) / scale),
        tokens=count,
        beyond=beyond,
        carried=size(carried),
        carried_rounding=float(np.sqrt(np.mean(natural**2)) / scale),
        replayed=size(replayed),
        experts=experts,
    )


def _experts(base: _Base, layer: int, apart: FloatArray, noise: FloatArray) -> tuple[int, ...]:
    """Which experts explain the difference: the square of each token's is the sum over its experts
    of (weight x the expert's own)^2.
    """
    gates = base.values.get(Site(layer=layer, role="gates"))
    if gates is None:
        return ()
    weights = np.square(gates.double().cpu().numpy())
    known = np.isfinite(apart)
    weights, apart, noise = weights[known], apart[known], noise[known]
    # an expert whose tokens are mostly well is not to blame for those that it shares with one that
    # is
    share = (weights * (apart > BEYOND * noise)[:, None]).sum(axis=0) / np.maximum(
        weights.sum(axis=0), 1e-300
    )
    suspects = np.flatnonzero(share > 0.8)
    if not len(suspects):
        return ()
    own, _ = optimize.nnls(weights[:, suspects], np.square(apart))
    allowed, _ = optimize.nnls(weights, np.square(noise))
    guilty = suspects[(own > BEYOND**2 * allowed[suspects]) & (own > 0.01 * own.max())]
    used = int((weights.sum(axis=0) > 0).sum())
    return tuple(guilty.tolist()) if len(guilty) <= max(1, used // 2) else ()
