"""The bundled model with its drafter, held-out problems, and what plain and speculative answers
have in common.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

import minimax_jax
from configs.speculative import SpeculativeConfig
from minimax_jax.chat import Chat
from minimax_jax.completion import Completion
from minimax_jax.generate import read_prompt
from minimax_jax.loaded import LoadedModel
from rl.data import SHORT, prompt_messages
from rl.evaluate import held_out

# A row of logits changes by some 3e-5 with the rows beside it; where that flips a code of the
# NVFP4 cache, by more: 200 answers had no tie at all, so the bound is that of a code's own step.
GAP = 0.05


@cache
def exact_tiny() -> LoadedModel:
    """All caches in float32, so that greedy answers are equal but for ties of float32."""
    config = SpeculativeConfig(kv_cache_dtype="f32")
    return minimax_jax.load("tiny", kv="f32", index="f32", speculative=config)


def chats(count: int, families: Sequence[str] = SHORT) -> list[list[dict[str, str]]]:
    """The first held-out problems, each a chat that asks one."""
    return [prompt_messages(problem) for problem in held_out(count, families)]


@dataclass(frozen=True)
class Ties:
    """Which of several answers differ, all of them by a proven tie."""

    rows: list[int]
    total: int

    def __str__(self) -> str:
        return f"{len(self.rows)} of {self.total} answers differ by a tie: {self.rows}"


def proven_ties(
    loaded: LoadedModel, asked: Sequence, ours: Sequence[Completion], theirs: Sequence[Completion]
) -> Ties:
    """AssertionError where two greedy answers differ first at a place whose two best logits are
    further apart than a tie, or where either token is none of these two.
    """
    rows = []
    for row, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.token_ids == b.token_ids:
            continue
        rows.append(row)
        pairs = zip(a.token_ids, b.token_ids, strict=False)
        place = next((k for k, (x, y) in enumerate(pairs) if x != y), None)
        assert place is not None, f"answer {row} is cut: {a.token_ids} and {b.token_ids}"
        prompt = read_prompt(loaded, asked[row], Chat(messages=())).ids
        sequence = np.array([*prompt, *a.token_ids[:place]])
        logits = np.asarray(minimax_jax.logits(loaded, sequence))[-1]
        chosen = logits[[a.token_ids[place], b.token_ids[place]]]
        assert np.all(chosen >= logits.max() - GAP), f"answer {row} differs at {place} by no tie"
    return Ties(rows, len(ours))
