"""``localise``: the module at which two forwards of the same tokens part by more than rounding.

The second model is run *led*: every site's output is recorded, and then replaced by the first
model's. So each module gets the first model's values and shows what it alone does differently; the
effects of a fault on later layers, and the flips of routers, are removed. How far the two are apart
without that is measured too, layer by layer.

The effect of rounding is measured at every site, for every token: by the first model in float64
(its own rounding), and by the first model in the second's precision (the other's). A site parts if
tokens are apart by more than ``BEYOND`` times that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import optimize

from rollproof.errors import GapError
from rollproof.gap.localise.localisation import MIN_TOKENS, Localisation, SiteGap
from rollproof.gap.localise.sites import Site
from rollproof.gap.token_pairs import BoolArray, FloatArray

if TYPE_CHECKING:
    from rollproof.gap.localise.forwards import Forward

__all__ = ["BEYOND", "localise"]

BEYOND = 2.0
"""How many times the sum of both sides' rounding two values must be apart.

Sides that differ by rounding alone show a quarter to a half of that sum (six families of models,
three precisions, other kernels and batches), so this is four to eight times what they show.
"""
# Share of an expert's tokens, by weight, that must be apart for it to be suspected
_GUILTY_SHARE = 0.8


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
    """Find where two forwards part. Some hundred tokens are enough. Needs torch.

    Args:
        first: the trusted side, a ``Forward`` or a model of HF transformers. It is copied and run
            in float64 and in the second's precision, to measure the effect of rounding.
        second: the other side, likewise.
        input_ids: ``(batch, width)``: the tokens, for sides that are models.
        attention_mask: ``(batch, width)``: which tokens count.
        led: replace the second side's outputs by the first's. Not possible in a compiled graph.
        replay: also run the second side with the first's experts, if it can.
        reruns: forwards of the first side with differences that count as rounding (another batch,
            another kernel). With them its model is not copied.
        names: the names of the sides in the result.

    Raises:
        GapError: the sides differ in their tokens, or have no module in common.
    """
    import torch

    trusted, other = (
        _to_forward(side, input_ids, attention_mask, name)
        for side, name in zip((first, second), names, strict=True)
    )
    if len(trusted.rows) != len(other.rows):
        raise GapError(
            f"{trusted.name} compares {len(trusted.rows)} tokens and {other.name}"
            f" {len(other.rows)}: both must run the same ones."
        )
    if not len(trusted.rows):
        raise GapError("There are no tokens to compare.")
    with torch.no_grad():
        base = _Base(trusted)
        if not base.values:
            raise GapError(
                f"No module of {trusted.name} has rows of the {trusted.size} tokens: is size the"
                " number of rows that it runs?"
            )
        alone = base.errors(other, led=led)
        unmatched = tuple(base.unmatched)
        rounding = _Rounding(base, trusted, other, reruns, frozenset(alone))
        carried = alone if not led else base.errors(other, led=False)
        replayed = (
            base.errors(other, led=False, replay=True)
            if replay and other.replay is not None and base.routes is not None
            else {}
        )
    # rounding errs by up to half a unit in the last place
    unit = max(torch.finfo(kind).eps / 2 for kind in (trusted.dtype, other.dtype))
    sites = [
        _site_gap(base, site, alone[site], rounding, unit, led, carried, replayed)
        for site in base.values
        if site in alone
    ]
    if not sites:
        raise GapError(
            f"{trusted.name} and {other.name} have no module in common; the first one has"
            f" {', '.join(map(str, list(base.values)[:8]))}."
        )
    lacking = [str(site) for site in base.values if site not in alone]
    return Localisation(
        first=trusted.name,
        second=other.name,
        n_tokens=len(trusted.rows),
        sites=tuple(sites),
        unmatched=tuple(
            lacking + [f"{name} (second)" for name in unmatched if name not in lacking]
        ),
        led=led,
        replayed=bool(replayed),
    )


def _to_forward(side: Any, input_ids: Any, attention_mask: Any, name: str) -> Forward:
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
    """The first side with its values at every site.

    Other runs are compared with them site by site, while they run.
    """

    def __init__(self, forward: Forward) -> None:
        from rollproof.gap.localise.forwards import visit_sites

        self.forward = forward
        self.values: dict[Site, Any] = {}
        with visit_sites(forward, self._store) as taps:
            forward.run(forward.model)
        self.modules = _modules(taps)
        self.other_modules: dict[Site, str] = {}
        self.unmatched: list[str] = []
        self.routes = self._routes()

    def _store(self, site: Site, values: Any) -> None:
        # a later module may overwrite its input in place
        self.values[site] = values.clone()

    def _routes(self) -> Any:
        """``(tokens, MoE layers, top_k)`` ids of the first side; ``None`` without routers."""
        import torch

        selected = [self.values[site] for site in self.values if site.role == "selection"]
        if not selected:
            return None
        top_k = int(selected[0].sum(dim=1).max())
        layers = [
            torch.argsort(layer.to(torch.int8), dim=1, descending=True, stable=True)[:, :top_k]
            for layer in selected
        ]
        return torch.stack(layers, dim=1)

    def size_of(self, site: Site) -> float:
        """Return the root mean square over tokens of the norm of the site's values."""
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
        """``(tokens,)`` at each common site: the norm of the difference to the first side.

        Args:
            forward: the side to run.
            led: replace its outputs by the first side's.
            replay: let it execute the first side's experts.
            only: the sites that are led and compared (default: all). If the second side lacks one,
                its block rounds as a unit.
        """
        from rollproof.gap.localise.forwards import visit_sites

        errors: dict[Site, FloatArray] = {}
        self.unmatched = []

        def visit(site: Site, values: Any) -> Any:
            mine = self.values.get(site)
            if mine is None or mine.shape != values.shape:
                self.unmatched.append(str(site))
                return None
            if only is not None and site not in only:
                return None
            mine = mine.to(values.device)
            if site.role == "selection":
                errors[site] = np.asarray((mine != values).any(dim=1).double().cpu().numpy())
                return mine if led else None
            apart = (values.double() - mine.double()).norm(dim=1)
            if site.role == "gates":
                # weights of different experts are not comparable
                apart = apart * _same_experts(errors, site, apart)
            errors[site] = np.asarray(apart.cpu().numpy())
            return mine if led else None

        with (
            self._replaying(forward) if replay else nullcontext(),
            visit_sites(forward, visit) as taps,
        ):
            forward.run(forward.model)
        names = _modules(taps)
        if not self.other_modules or forward.model is not self.forward.model:
            self.other_modules = names
        return errors

    def _replaying(self, forward: Forward) -> Any:
        import torch

        if forward.replay is None or self.routes is None:
            return nullcontext()
        # rows that are not compared are free (-1)
        routes = torch.full((forward.size, *self.routes.shape[1:]), -1, dtype=torch.int64)
        routes[torch.from_numpy(np.ascontiguousarray(forward.rows))] = self.routes.cpu()
        return forward.replay(forward.model, routes)


def _same_experts(errors: Mapping[Site, FloatArray], site: Site, like: Any) -> Any:
    """1 for tokens with the same experts on both sides, else 0."""
    flipped = errors.get(Site(layer=site.layer, role="selection"))
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
    """The effect of rounding at each site on each token: led, and carried."""

    def __init__(
        self,
        base: _Base,
        trusted: Forward,
        other: Forward,
        reruns: Sequence[Forward],
        shared: frozenset[Site],
    ) -> None:
        import torch

        self.led: list[dict[Site, FloatArray]] = []
        self.carried: list[dict[Site, FloatArray]] = []
        copies = list(reruns)
        if not copies:
            kinds = [torch.float64] + [other.dtype] * (other.dtype is not trusted.dtype)
            copies = [trusted.recast(kind) for kind in kinds]
        for copy in copies:
            self.led.append(base.errors(copy, led=True, only=shared))
            self.carried.append(base.errors(copy, led=False, only=shared))
        if len(copies) == 1 and not reruns:  # both sides have one precision and round the same way
            self.led *= 2
            self.carried *= 2

    def of(self, runs: Sequence[Mapping[Site, FloatArray]], site: Site, tokens: int) -> FloatArray:
        """``(tokens,)``: the sum over the runs, since each side rounds by itself."""
        return np.asarray(sum((run[site] for run in runs if site in run), np.zeros(tokens)))


def _site_gap(
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
        # a token's own rounding may be small by chance, so it is at least that of its neighbours
        noise = np.maximum(floor, np.quantile(floor, 0.9)) + unit * base.norms(site)
        parted: BoolArray = ~(apart <= BEYOND * noise)  # NaN is beyond
        count = int(parted.sum())
        with np.errstate(invalid="ignore", divide="ignore"):
            times = apart / noise
        beyond = float(np.median(times[parted] if count else times))
        if site.role in ("experts", "mlp") and count >= MIN_TOKENS:
            experts = _experts(base, site.layer, apart, noise)

    def relative_size(errors: Mapping[Site, FloatArray]) -> float:
        return (
            float(np.sqrt(np.mean(errors[site] ** 2)) / scale) if site in errors else float("nan")
        )

    natural = rounding.of(rounding.carried, site, tokens)
    return SiteGap(
        site=site,
        module=base.modules.get(site, str(site)),
        other_module=base.other_modules.get(site, str(site)),
        alone=float(np.sqrt(np.mean(apart**2)) / scale),
        rounding=float(np.sqrt(np.mean(noise**2)) / scale),
        tokens=count,
        beyond=beyond,
        carried=relative_size(carried),
        carried_rounding=float(np.sqrt(np.mean(natural**2)) / scale),
        replayed=relative_size(replayed),
        experts=experts,
    )


def _experts(base: _Base, layer: int, apart: FloatArray, noise: FloatArray) -> tuple[int, ...]:
    """Return the experts that explain the difference, if they are few.

    The square of a token's difference is the sum over its experts of (weight x the expert's)^2.
    """
    gates = base.values.get(Site(layer=layer, role="gates"))
    if gates is None:
        return ()
    weights = np.square(gates.double().cpu().numpy())
    finite = np.isfinite(apart)
    weights, apart, noise = weights[finite], apart[finite], noise[finite]
    # an expert with mostly good tokens is not to blame for those that it shares with a bad one
    parted = (weights * (apart > BEYOND * noise)[:, None]).sum(axis=0)
    share = parted / np.maximum(weights.sum(axis=0), 1e-300)
    suspects = np.flatnonzero(share > _GUILTY_SHARE)
    if not len(suspects):
        return ()
    own, _ = optimize.nnls(weights[:, suspects], np.square(apart))
    # the same equation for rounding gives what each expert may differ by
    allowed, _ = optimize.nnls(weights, np.square(noise))
    guilty = suspects[(own > BEYOND**2 * allowed[suspects]) & (own > 0.01 * own.max())]
    used = int((weights.sum(axis=0) > 0).sum())
    return tuple(guilty.tolist()) if len(guilty) <= max(1, used // 2) else ()
