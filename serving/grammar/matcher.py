"""Where one sequence stands in its grammar, and which tokens may come next.

Stop tokens are allowed exactly where the grammar accepts what has been written. Drafts change
nothing: `masks` walks along them and comes back.
"""

from collections.abc import Sequence

import llguidance
import numpy as np

from serving.grammar.vocabulary import GrammarVocabulary


class GrammarMatcher:
    """The state of a sequence; one thread at a time may use it."""

    def __init__(
        self, state: llguidance.LLMatcher, vocabulary: GrammarVocabulary, stop_ids: Sequence[int]
    ):
        """`stop_ids` may end the sequence; without any, the tokenizer's own do."""
        self._state = state
        self._vocabulary = vocabulary
        self._stop_ids = frozenset(stop_ids or vocabulary.eos_ids)
        self._stops = vocabulary.mask_of(sorted(self._stop_ids))
        self._num_tokens = 0  # of the grammar; a stop token is none
        self._has_stopped = False

    @property
    def num_tokens(self) -> int:
        """How many tokens were taken, a stop token included."""
        return self._num_tokens + self._has_stopped

    @property
    def is_accepting(self) -> bool:
        """Whether the text so far is one of the grammar's, whole."""
        return self._has_stopped or self._state.is_accepting()

    @property
    def must_stop(self) -> bool:
        """Whether only a stop token may follow."""
        return self._has_stopped or (self._state.is_accepting() and self._state.is_stopped())

    def mask(self) -> np.ndarray:
        """The tokens that may come next, packed: uint32 [num_words]. RuntimeError when the grammar
        has outgrown its limits.
        """
        if self._has_stopped:
            return self._stops.copy()
        packed = np.zeros(self._vocabulary.num_words, "<u4")
        # The engine's mask ends with the tokenizer's own tokens; what follows them is padding.
        words = np.frombuffer(self._state.compute_bitmask(), "<u4")[: len(packed)]
        self._check()
        packed[: len(words)] = words
        packed &= self._vocabulary.valid
        if self._state.is_accepting():
            packed |= self._stops
        return packed

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        """The masks before each draft and behind the last: uint32 [drafts + 1, num_words].

        Behind a draft that is not allowed nothing is bound any more, since no later one can count.
        """
        rows = np.tile(self._vocabulary.valid, (len(drafts) + 1, 1))
        rows[0] = self.mask()
        taken = 0
        for row, draft in zip(rows[1:], drafts, strict=True):
            if not self._take(draft):
                break
            taken += 1
            row[:] = self.mask()
        self.rollback(taken)
        return rows

    def advance(self, tokens: Sequence[int]) -> None:
        """Takes the tokens. ValueError when one is not allowed there, and then takes none."""
        for count, token in enumerate(tokens):
            if not self._take(token):
                self.rollback(count)
                raise ValueError(
                    f"token {token} is not allowed by the grammar after {self.num_tokens + count} "
                    "tokens"
                )

    def rollback(self, num_tokens: int) -> None:
        """Forgets the last tokens. ValueError when there are not as many."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"cannot take back {num_tokens} of {self.num_tokens} tokens")
        if num_tokens and self._has_stopped:
            self._has_stopped = False
            num_tokens -= 1
        if num_tokens:
            self._state.rollback(num_tokens)
            self._num_tokens -= num_tokens
            self._check()

    def forced(self) -> list[int]:
        """The tokens that must come next, as the tokenizer spells the text that must."""
        if self._has_stopped or self._state.is_accepting():
            return []
        tokens = self._state.compute_ff_tokens()
        self._check()
        return tokens[: self._state.validate_tokens(tokens)]

    def _take(self, token: int) -> bool:
        if self._has_stopped:
            return False
        if self._allows_text(token):
            self._num_tokens += 1
            self._state.consume_token(token)
            self._check()
            return True
        self._has_stopped = token in self._stop_ids and self._state.is_accepting()
        return self._has_stopped

    def _allows_text(self, token: int) -> bool:
        """Whether the grammar goes on with this token."""
        return self._vocabulary.has(token) and self._state.validate_tokens([token]) == 1

    def _check(self) -> None:
        if self._state.is_error():
            raise RuntimeError(
                f"the grammar cannot go on after {self._num_tokens} tokens: "
                f"{self._state.get_error().splitlines()[0]}"
            )
