"""The exact law of tokens that come out of scheduled speculative decoding: each block of drafts
with its probability, and what verification does with it (spec/dspark 2.7), in plain arithmetic.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from types import FunctionType

Row = Sequence[float]  # the probability of each token
Tokens = tuple[int, ...]
Law = dict[Tokens, float]
Confidence = Callable[[Tokens], float]  # of the next draft, given those of the block before it
# Widths from the survivals of the drafts of all sequences, and from those of the block before.
Schedule = Callable[[list[list[float]], list[list[float]]], Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A target and a drafter whose rows depend on the token before, and how sure the drafter is."""

    target: Sequence[Row]
    draft: Sequence[Row]
    confidence: Confidence
    num_drafts: int = 2

    def survival(self, drafts: Tokens) -> list[float]:
        """The product of the confidences; that of draft j depends on drafts before j."""
        survival, product_ = [], 1.0
        for place in range(self.num_drafts):
            product_ *= self.confidence(drafts[:place])
            survival.append(product_)
        return survival

    def blocks(self, anchor: int) -> list[tuple[Tokens, float]]:
        """All blocks of drafts with their probabilities."""
        found = []
        for drafts in product(range(len(self.target)), repeat=self.num_drafts):
            chance, before = 1.0, anchor
            for token in drafts:
                chance *= self.draft[before][token]
                before = token
            found.append((drafts, chance))
        return [(drafts, chance) for drafts, chance in found if chance > 0]

    def committed(self, anchor: int, drafts: Tokens, width: int) -> Law:
        """What is committed if the first `width` drafts are tested."""
        law: Law = defaultdict(float)
        reached, before = 1.0, anchor
        for place, token in enumerate(drafts[:width]):
            p, q = self.target[before], self.draft[before]
            kept = min(1.0, p[token] / q[token])
            residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
            for other, mass in enumerate(residual):
                if kept < 1:
                    share = mass / sum(residual)
                    law[*drafts[:place], other] += reached * (1 - kept) * share
            reached, before = reached * kept, token
        for token, chance in enumerate(self.target[before]):
            law[*drafts[:width], token] += reached * chance
        return law


def joint_law(toys: Sequence[Toy], schedule: Schedule, stale: list[list[float]]) -> Law:
    """The law of each sequence's first token, from one step of all of them. Anchors are token 0."""
    law: Law = defaultdict(float)
    for chosen in product(*(toy.blocks(anchor=0) for toy in toys)):
        survivals = [toy.survival(drafts) for toy, (drafts, _) in zip(toys, chosen, strict=True)]
        widths = schedule(survivals, stale)
        each = [
            toy.committed(0, drafts, width)
            for toy, (drafts, _), width in zip(toys, chosen, widths, strict=True)
        ]
        drafted = _product(chance for _, chance in chosen)
        for outcome in product(*(law.items() for law in each)):
            first = tuple(tokens[0] for tokens, _ in outcome)
            law[first] += drafted * _product(chance for _, chance in outcome)
    return law


def law_of_text(toy: Toy, schedule: Schedule, length: int) -> Law:
    """The law of the first tokens of one sequence, block after block, from token 0 on."""
    law: Law = defaultdict(float)
    begun: list[tuple[Tokens, list[list[float]], float]] = [((), [[]], 1.0)]
    while begun:
        text, stale, reached = begun.pop()
        if len(text) >= length:
            law[text[:length]] += reached
            continue
        anchor = text[-1] if text else 0
        for drafts, chance in toy.blocks(anchor):
            survivals = [toy.survival(drafts)]
            width = schedule(survivals, stale)[0]
            for tokens, share in toy.committed(anchor, drafts, width).items():
                begun.append((text + tokens, survivals, reached * chance * share))
    return law


def target_law(toy: Toy, length: int) -> Law:
    """The law of the target's own first tokens."""
    law: Law = {}
    for text in product(range(len(toy.target)), repeat=length):
        pairs = zip((0, *text), text, strict=False)
        law[text] = _product(toy.target[before][token] for before, token in pairs)
    return law


def difference(one: Law, other: Law) -> float:
    """The total variation between two laws."""
    return 0.5 * sum(abs(one.get(x, 0.0) - other.get(x, 0.0)) for x in one.keys() | other.keys())


def mutated(function: FunctionType, old: str, new: str) -> FunctionType:
    """The function with one piece of its source exchanged: a planted fault."""
    source = inspect.getsource(function)
    assert source.count(old) == 1, f"{old!r} is in {function.__name__} {source.count(old)} times"
    namespace = dict(function.__globals__)
    exec(source.replace(old, new), namespace)
    return namespace[function.__name__]


def _product(factors) -> float:
    result = 1.0
    for factor in factors:
        result *= factor
    return result
