"""Random prompts of exact length, as ids and, where a tokenizer is at hand, as text.

With a tokenizer only such tokens are drawn as are a space and a word. Byte-level BPE splits a text
before spaces, so any run of them is encoded as just these tokens, and a prompt has the same ids
whether it is sent as ids or as text.
"""

import re
from array import array

import numpy as np

from minimax_jax.chat import Tokenizer
from serving.bench.asks import Role, Segment
from serving.bench.client import Facts

_WORD = re.compile(rb" [A-Za-z]+")
LEAST_WORDS = 16


class Words:
    """What random prompts are made of."""

    def __init__(self, facts: Facts, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        if tokenizer is not None:
            ids = [i for i in range(tokenizer.num_tokens) if _is_word(tokenizer, i)]
        elif facts.vocab_size is not None:
            ids = sorted(set(range(facts.vocab_size)) - set(facts.stop_ids))
        else:
            raise ValueError("the server does not say how many tokens it knows: give --tokenizer")
        if len(ids) < LEAST_WORDS:
            raise ValueError(f"only {len(ids)} tokens are words, expected at least {LEAST_WORDS}")
        self._ids = np.array(ids, np.int32)

    def draw(self, random: np.random.Generator, count: int) -> array:
        """So many random ids."""
        chosen = self._ids[random.integers(len(self._ids), size=count)]
        ids = array("i")
        ids.frombytes(chosen.tobytes())
        return ids

    def segment(self, role: Role, ids: array) -> Segment:
        """A part of a prompt of these ids."""
        text = None if self._tokenizer is None else self._tokenizer.decode(ids)
        return Segment(role=role, ids=ids, text=text)


def _is_word(tokenizer: Tokenizer, token_id: int) -> bool:
    if not _WORD.fullmatch(tokenizer.token_bytes(token_id)):
        return False
    return tokenizer.encode(tokenizer.decode([token_id])) == [token_id]
