"""Grammars of the bundled tokenizer, and replies drawn at random from what they allow."""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from minimax_jax.chat import Tokenizer
from serving.grammar.grammars import GrammarLimits, Grammars
from serving.grammar.matcher import GrammarMatcher
from serving.grammar.source import Thought
from serving.grammar.vocabulary import GrammarVocabulary
from serving.scheduling.sampling_params import StructuredOutput
from tests.chat.folders import TINY

VOCAB_SIZE = 512  # the model's; the tokenizer has fewer
Choose = Callable[[np.ndarray], int]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY)


@cache
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer(), VOCAB_SIZE)


@cache
def grammars() -> Grammars:
    return Grammars(vocabulary())


def matcher(
    kind: str,
    text: str,
    thought: Thought = Thought.OVER,
    stop_ids: Sequence[int] | None = None,
    from_first_token: bool = False,
) -> GrammarMatcher:
    output = StructuredOutput(kind=kind, text=text, from_first_token=from_first_token)  # type: ignore
    stops = tokenizer().stop_ids if stop_ids is None else stop_ids
    return grammars().matcher(output, thought, stops)


def outgrowing() -> GrammarMatcher:
    """One whose first mask is small, and whose second is beyond its limit."""
    output = StructuredOutput(kind="grammar", text='root ::= "x" y\ny ::= y y y | [a-z] | ""')
    tight = Grammars(vocabulary(), GrammarLimits(mask_items=100))
    return tight.matcher(output, Thought.OVER, ())


def allowed(one: GrammarMatcher) -> np.ndarray:
    """The ids that may come next."""
    return np.flatnonzero(vocabulary().unpack(one.mask()))


@cache
def _byte_ids() -> dict[bytes, int]:
    return {tokenizer().token_bytes(i): i for i in range(tokenizer().num_tokens)}


def plain_ids(text: str) -> list[int]:
    """The ids of a text, one a byte, so that no marker is its token."""

    return [_byte_ids()[bytes([byte])] for byte in text.encode()]


def draw(one: GrammarMatcher, rng: np.random.Generator, most: int = 300) -> str | None:
    """A whole reply, without its stop token, of tokens drawn from those allowed; None when it is
    too long. Where text may end it does so often, for evenly drawn strings do not.
    """
    endings = {tokenizer().encode(end)[-1] for end in ('"', "}", "]")}
    ids: list[int] = []
    while len(ids) < most:
        choices = allowed(one)
        assert len(choices), f"nothing may follow {tokenizer().decode(ids)!r}"
        ends = [i for i in choices if i in endings or i in tokenizer().stop_ids]
        token = int(rng.choice(ends if ends and rng.random() < 0.3 else choices))
        one.advance([token])
        if token in tokenizer().stop_ids:
            return tokenizer().decode(ids)
        ids.append(token)
    return None


def accepts(one: GrammarMatcher, ids: Sequence[int]) -> bool:
    """Whether the ids are a whole text of the grammar; the matcher is used up."""
    for token in ids:
        if token not in allowed(one):
            return False
        one.advance([token])
    return one.is_accepting
