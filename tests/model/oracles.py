"""What a layer should give for the operands that it read, in numpy float64, and which values a
cache may give back. Letters and records as in `tests.model.ways`.
"""

import ml_dtypes
import numpy as np

from configs.model import ModelConfig
from minimax_jax.moe import Router
from tests.model.ways import Seen

GROUP = 16  # elements that share an NVFP4 scale


def nearest(x: np.ndarray, fmt: str, compute: str = "exact") -> np.ndarray:
    """What the cache gives back for x, in float32."""
    if fmt != "nvfp4":
        return _rounded(x, fmt)
    groups = _in_groups(x)
    scale = _rounded(np.abs(groups).max(-1, keepdims=True) * np.float32(1 / 6), "fp8")
    return _nvfp4(groups, scale, compute).reshape(x.shape)


def is_rounding(
    seen: np.ndarray, x: np.ndarray, distance: float, fmt: str, compute: str = "exact"
) -> np.ndarray:
    """Whether each value is what the cache gives back for a number within `distance` of x.

    An NVFP4 group stands or falls as one: some scale that an amax within the distance has must
    explain every element.
    """
    low, high = x.astype(np.float64) - distance, x.astype(np.float64) + distance
    if fmt != "nvfp4":
        between = (_rounded(low, fmt) <= seen) & (seen <= _rounded(high, fmt))
        return between & (_rounded(seen, fmt) == seen)
    amax = np.abs(_in_groups(x)).max(-1, keepdims=True).astype(np.float64)
    proven = np.zeros(amax.shape, bool)
    for near in (amax - distance, amax + distance):
        scale = _rounded(np.maximum(near, 0) / 6, "fp8")
        ends = [_nvfp4(_in_groups(end), scale, compute) for end in (low, high)]
        explained = (_in_groups(seen) == ends[0]) | (_in_groups(seen) == ends[1])
        proven |= explained.all(-1, keepdims=True)
    return np.broadcast_to(proven, _in_groups(x).shape).reshape(x.shape)


def is_best(scores: np.ndarray, chosen: np.ndarray, gap: float) -> np.ndarray:
    """Whether each row of `chosen` [..., C] (-1: unused) holds the best of `scores` [..., M], as
    many as there are; one left out may be better by `gap`. A score of -inf is no candidate.
    """
    taken = (chosen[..., None] == np.arange(scores.shape[-1])).any(-2)
    candidates = np.minimum((scores > -np.inf).sum(-1), chosen.shape[-1])
    enough = (taken.sum(-1) == candidates) & ((chosen >= 0).sum(-1) == candidates)
    worst_taken = np.where(taken, scores, np.inf).min(-1)
    best_left = np.where(taken, -np.inf, scores).max(-1)
    return enough & (worst_taken >= best_left - gap)


def same_choice(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[T]: whether both hold the same ids, in any order."""
    same = np.sort(a, axis=-1) == np.sort(b, axis=-1)
    return same.reshape(len(same), -1).all(-1)


def best_margin(scores: np.ndarray, count: int) -> np.ndarray:
    """[...]: how much worse the best that is left out of the `count` best of [..., M] is than the
    worst of them; infinite where none is left out.
    """
    if scores.shape[-1] <= count:
        return np.full(scores.shape[:-1], np.inf)
    ranked = np.sort(scores, axis=-1)[..., ::-1]
    last, left = ranked[..., count - 1], ranked[..., count]
    with np.errstate(invalid="ignore"):  # -inf less -inf, where there are fewer candidates
        return np.where(left == -np.inf, np.inf, last - left)


def block_scores(seen: Seen, config: ModelConfig) -> np.ndarray:
    """[T, K, P]: each block's best causal key, infinite where it is forced (spec/model 2.8)."""
    Z, c, T = config.indexer.block_size, config.indexer, len(seen["x"])
    keys = seen["index_k"][0].astype(np.float64)
    scores = np.einsum("TKI,SI->TKS", seen["index_q"].astype(np.float64), keys)
    scores = np.where(_causal(T), scores, -np.inf)
    scores = np.pad(scores, [(0, 0), (0, 0), (0, -T % Z)], constant_values=-np.inf)
    scores = scores.reshape(*scores.shape[:2], scores.shape[2] // Z, Z).max(-1)
    blocks, newest = np.arange(scores.shape[-1]), np.arange(T)[:, None, None] // Z
    forced = (blocks < c.init_blocks) | (blocks > newest - c.local_blocks)
    return np.where(forced & (blocks <= newest), np.inf, scores)


def expert_scores(router: Router, routed: np.ndarray) -> np.ndarray:
    """[T, E]: what the router chooses by (spec/model 2.11)."""
    weight, bias = (np.float64(p.get_value()) for p in (router.weight, router.bias))
    return 1 / (1 + np.exp(-routed.astype(np.float64) @ weight.T)) + bias


def attend(seen: Seen, block_size: int) -> np.ndarray:
    """[T, N, H]: softmax attention over the keys that were read, of the blocks that were chosen."""
    (T, N, H), K = seen["q"].shape, len(seen["k"])
    q, k, v = (seen[name].astype(np.float64) for name in ("q", "k", "v"))
    scores = np.einsum("TKGH,KSH->TKGS", q.reshape(T, K, N // K, H), k) * H**-0.5
    scores = np.where(visible(seen, block_size)[:, :, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("TKGS,KSH->TKGH", weights, v).reshape(T, N, H)


def visible(seen: Seen, block_size: int) -> np.ndarray:
    """[T, K, S]: whether a query attends to a key."""
    T, K = len(seen["x"]), len(seen["k"])
    if "ids" not in seen:
        return np.broadcast_to(_causal(T), (T, K, T))
    chosen = (seen["ids"][..., None] == np.arange(T) // block_size).any(-2)
    return _causal(T) & chosen


def _causal(T: int) -> np.ndarray:
    """[T, 1, S]"""
    return (np.arange(T) <= np.arange(T)[:, None])[:, None]


def _rounded(x: np.ndarray, fmt: str) -> np.ndarray:
    """To a format whose codes stand alone, and back to float32."""
    if fmt == "f32":
        return x.astype(np.float32)
    dtype = {"bf16": ml_dtypes.bfloat16, "fp8": ml_dtypes.float8_e4m3fn}[fmt]
    return x.astype(dtype).astype(np.float32)


def _nvfp4(groups: np.ndarray, scale: np.ndarray, compute: str) -> np.ndarray:
    ratio = groups / np.where(scale == 0, np.inf, scale)
    value = ratio.astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale
    return _rounded(value, "fp8") if compute == "e4m3" else value


def _in_groups(x: np.ndarray) -> np.ndarray:
    return x.reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)
