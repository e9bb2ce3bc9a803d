"""The proof that ways through the model are one function up to ties, where their caches round.

Float32 sums in another order differ in the last bits; a rounding, or a choice of the best, makes a
step of that. Such a step is a tie, and proven, when the value lies within a stated distance of the
point where its rounding changes, or the scores within a stated gap. Two proofs, by records of
`tests.model.ways`:

`prove` takes one way. Each layer is held against the packed way without rounding on the same
inputs, so that a tie in one layer excuses nothing in the next: keys and queries are roundings of
the same values, the chosen blocks and experts are the best, attention is that of the keys that were
read, and the output follows from it. No token is left out.

`agreement` takes two ways from the tokens to the logits. A token is followed until it, or a key
that it reads, meets a tie; until then its inputs are the same to rounding, and so are its logits.
"""

from dataclasses import dataclass

import numpy as np

from configs.model import ModelConfig
from minimax_jax.model import DecoderLayer, Model
from minimax_jax.moe import MoE
from pallas_kernels.layouts.pool import CacheFormats
from tests.model.oracles import (
    attend,
    block_scores,
    expert_scores,
    is_best,
    is_rounding,
    nearest,
    same_choice,
    visible,
)
from tests.model.ways import KEYS, Seen, Walk, unrounded
from tests.numerics import ABSOLUTE_TOLERANCE

# Bounds, each with the most that 320 tokens of four random `small()` models came to on a CPU.
DISTANCE = 2.0**-17  # 2.4e-6: a layer's keys and queries, of the same inputs, up to 7 large
ATTENDED = 5e-6  # 1.1e-6: attention against float64
OUTPUT = 3e-5  # 6.2e-6: a layer's output, given what attention gave and the same experts
STREAM = 3e-5  # 9.6e-6: the residual stream, and what a layer makes of it, before any tie
# Gaps of scores: no choice needed one. A block's score sums 32 products, 32 in all at most, and
# an expert's is a sigmoid of 64: in float32 both are off by some 2^-20 of that.
BLOCK_GAP = 3e-5
EXPERT_GAP = 1e-6
MOST_TIES = 0.01  # of the codes


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A way whose every layer is right, and what each layer does without rounding."""

    walk: Walk
    exact: list[Seen]
    codes: int  # of keys, and of queries where they are rounded, in all layers
    ties: int  # of them, that are not the nearest to the unrounded value


def prove(model: Model, walk: Walk, formats: CacheFormats) -> Proof:
    """AssertionError at the first layer that is not right on its inputs, or with too many ties."""
    exact = [unrounded(model, i, seen) for i, seen in enumerate(walk.layers)]
    codes = ties = 0
    for layer, seen, wanted in zip(model.layers, walk.layers, exact, strict=True):
        _assert_roundings(seen, wanted, formats, DISTANCE, np.ones(len(seen["x"]), bool))
        _assert_attention(seen, model.config)
        _assert_output(layer, seen, wanted)
        for name, fmt in _operands(seen, formats):
            if fmt != "f32":
                tied = seen[name] != nearest(wanted[name], fmt, formats.compute)
                codes, ties = codes + tied.size, ties + int(tied.sum())
    assert ties <= MOST_TIES * codes, f"{ties} of {codes} codes are ties"
    return Proof(walk=walk, exact=exact, codes=codes, ties=ties)


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far two ways go together."""

    share: float  # of the tokens, that meet no tie up to their logits
    first: tuple[int, int] | None  # layer and token of the first tie

    def __str__(self) -> str:
        if self.first is None:
            return "no token meets a tie"
        share, (layer, token) = 1 - self.share, self.first
        return f"{share:.1%} of the tokens meet a tie, token {token} in layer {layer} first"


def agreement(first: Proof, second: Proof, formats: CacheFormats, block_size: int) -> Agreement:
    """AssertionError where two ways differ without a tie before.

    At a token whose inputs are the same, other codes must be roundings of one value. (Other choices
    are ties by `prove`: both are the best by the scores of the same keys.)
    """
    clean, place = np.ones(len(first.walk.logits), bool), None
    layers = zip(first.walk.layers, second.walk.layers, first.exact, strict=True)
    for i, (a, b, exact) in enumerate(layers):
        _assert_all((np.abs(a["x"] - b["x"]) <= STREAM)[clean], "inputs of two ways differ")
        _assert_roundings(b, exact, formats, STREAM, clean)
        tied = clean & _meets_a_tie(a, b, block_size)
        if place is None and tied.any():
            place = (i, int(tied.argmax()))
        clean &= ~tied
    limit = ABSOLUTE_TOLERANCE["f32_logits"]
    a, b = first.walk.logits[clean], second.walk.logits[clean]
    with np.errstate(invalid="ignore"):  # padded rows of the head are -inf
        _assert_all((a == b) | (np.abs(a - b) <= limit), "logits of two ways differ")
    return Agreement(share=float(clean.mean()), first=place)


def _operands(seen: Seen, formats: CacheFormats) -> list[tuple[str, str]]:
    """What attention and indexer work with, and the format that it is rounded to."""
    parts = [("k", formats.kv), ("v", formats.kv), ("index_k", formats.index)]
    for name, fmt in (("q", formats.kv), ("index_q", formats.index)):
        parts.append((name, "fp8" if formats.rounds_queries(fmt) else "f32"))
    return [(name, fmt) for name, fmt in parts if name in seen]


def _assert_roundings(
    seen: Seen, exact: Seen, formats: CacheFormats, distance: float, tokens: np.ndarray
) -> None:
    for name, fmt in _operands(seen, formats):
        right = is_rounding(seen[name], exact[name], distance, fmt, formats.compute)
        right = right[:, tokens] if name in KEYS else right[tokens]
        _assert_all(right, f"{name} are no {fmt} roundings of the values")


def _assert_attention(seen: Seen, config: ModelConfig) -> None:
    if "ids" in seen:
        best = is_best(block_scores(seen, config), seen["ids"], BLOCK_GAP)
        _assert_all(best, "choices of blocks are not the best")
    error = np.abs(seen["attended"] - attend(seen, config.indexer.block_size))
    _assert_all(error <= ATTENDED, "outputs of attention are not those of what was read")


def _assert_output(layer: DecoderLayer, seen: Seen, exact: Seen) -> None:
    same = np.ones(len(seen["x"]), bool)
    if isinstance(layer.mlp, MoE):
        best = is_best(expert_scores(layer.mlp.router, seen["routed"]), seen["experts"], EXPERT_GAP)
        _assert_all(best, "choices of experts are not the best")
        same = same_choice(seen["experts"], exact["experts"])
    _assert_all((np.abs(seen["out"] - exact["out"]) <= OUTPUT)[same], "outputs of the layer differ")


def _meets_a_tie(a: Seen, b: Seen, block_size: int) -> np.ndarray:
    """[T]: the tokens for which the two ways chose something else or read another code."""
    met = np.zeros(len(a["x"]), bool)
    for name in {"ids", "experts"} & a.keys():
        met |= ~same_choice(a[name], b[name])
    for name in {"q", "index_q"} & a.keys():
        met |= _flipped(a[name], b[name]).any(-1)
    flipped = _flipped(a["k"], b["k"]) | _flipped(a["v"], b["v"])
    met |= (visible(a, block_size) & flipped).any((1, 2))
    return met


def _flipped(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Rows that differ by a code rather than by a rounding of float32."""
    return np.any(np.abs(a - b) > STREAM, axis=-1)


def _assert_all(right: np.ndarray, complaint: str) -> None:
    wrong = np.argwhere(~right)
    first = wrong[0].tolist() if len(wrong) else None
    assert not len(wrong), f"{len(wrong)} of {right.size} {complaint}, the first at {first}"
