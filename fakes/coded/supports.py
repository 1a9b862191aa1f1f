"""The supports that a coded policy draws from: a coded set of ids for each token.

The policy has no distribution to cut, so a support is coded as its other values are: a window of
consecutive ids whose place and size come from the tokens before. A support of another token,
another weight version or another sequence differs, unless both have one id.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from rollproof.core.records import Scalar
from rollproof.core.sampling_masks import SamplingMask, is_greedy, leaves_tokens_out
from rollproof.fakes.coded.hashing import Hashes

__all__ = ["coded_supports"]

_WIDEST = 12
"""Ids of the largest support that top_p and min_p leave without a top_k."""
_SIZE_SHIFT, _PLACE_SHIFT, _TIE_BITS = np.uint64(20), np.uint64(33), np.uint64(7)


def coded_supports(
    hashes: Hashes, tokens: npt.NDArray[np.int64], vocab: int, sampling: Mapping[str, Scalar]
) -> SamplingMask | None:
    """Return the supports of sampled ``tokens``, ids ascending; ``None`` if ``sampling`` leaves no
    token out.

    Args:
        hashes: ``(tokens,)``: what the policy draws before each token.
        tokens: ``(tokens,)``: each is in its support.
        vocab: ids are below it.
        sampling: the parameters of the call.
    """
    if not is_greedy(sampling) and not leaves_tokens_out(sampling):
        return None
    sizes = np.minimum(_sizes(hashes, sampling), vocab)
    widest = np.arange(sizes.max(initial=0))
    places = (hashes >> _PLACE_SHIFT).astype(np.int64) % vocab
    ids = (places[:, None] + widest) % vocab
    inside = widest < sizes[:, None]
    absent = ~((ids == tokens[:, None]) & inside).any(axis=1)
    ids[absent, :1] = tokens[absent, None]
    # what is no id of a support sorts behind all that are
    ids[~inside] = vocab
    ids.sort(axis=1)
    return SamplingMask(counts=sizes, token_ids=ids[ids < vocab])


def _sizes(hashes: Hashes, sampling: Mapping[str, Scalar]) -> npt.NDArray[np.int64]:
    if is_greedy(sampling):
        return np.ones(len(hashes), dtype=np.int64)
    top_k = sampling.get("top_k")
    limit = int(top_k) if isinstance(top_k, int | float) and top_k > 0 else None
    if limit is None or leaves_tokens_out({**sampling, "top_k": None}):
        drawn = (hashes >> _SIZE_SHIFT) % np.uint64(limit or _WIDEST)
        return drawn.astype(np.int64) + 1
    # tokens that are tied at the cutoff are all left in (SGLang #34037)
    sizes = np.full(len(hashes), limit, dtype=np.int64)
    sizes[hashes & _TIE_BITS == 0] += 1
    return sizes
