"""Stop strings of a sequence, looked for in its text wherever its tokens end."""

from collections.abc import Sequence
from functools import lru_cache

from minimax_jax.chat import StopMatch, TextStream, Tokenizer
from serving.scheduling.sampling_params import SamplingParams

MOST_SETS = 64  # of harmless tokens; a set has at most an entry a token of the vocabulary


class StopWatch:
    """Reads a sequence's tokens up to the one that completes a stop string.

    Tokens that may be part of one are to be told together with what decides it, so that whoever
    reads the text of the last tokens alone can cut the stop string off.

    Most tokens cannot begin a stop string, and these are not decoded where none has begun: with 256
    sequences that saves a millisecond a step.
    """

    def __init__(self, sampling: SamplingParams, tokenizer: Tokenizer, harmless: "HarmlessTokens"):
        self._min_tokens, self._harmless = sampling.min_tokens, harmless
        self._stream = TextStream(
            tokenizer, stop=sampling.stop, min_tokens=sampling.min_tokens, include_stop=True
        )
        self._num_read = self._num_skipped = 0
        # Whether all that was read is certain, and enough for stop strings to count.
        self._is_clear = not sampling.min_tokens

    @property
    def match(self) -> StopMatch | None:
        """The stop string that was met."""
        return self._stream.match

    @property
    def num_certain(self) -> int:
        """How many of the sequence's tokens no stop string can reach any more."""
        return self._num_skipped + self._stream.num_certain_tokens

    def skips(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens are read already, as no stop string begins with any of them."""
        if self._is_clear and self._harmless.has(tokens):
            self._num_skipped += len(tokens)
            return True
        return False

    def read(self, tokens: Sequence[int]) -> int | None:
        """Takes tokens; how many there are up to the one that completes a stop string, if any."""
        for count, token in enumerate(tokens, start=1):
            if self.skips((token,)):
                continue
            self._stream.push(token)
            self._num_read += 1
            if self._stream.match is not None:
                return count
            self._is_clear = (
                self._num_read >= self._min_tokens
                and self._stream.num_certain_tokens == self._num_read
            )
        return None

    def end(self) -> None:
        """Ends the text; an unfinished character, now U+FFFD, may complete a stop string."""
        self._stream.finish()


class HarmlessTokens:
    """The tokens of whole characters none of which begins a stop string, as far as anyone asked."""

    def __init__(self, tokenizer: Tokenizer, first_characters: frozenset[str]):
        self._tokenizer, self._first_characters = tokenizer, first_characters
        self._harmless: set[int] = set()
        self._others: set[int] = set()

    def has(self, tokens: Sequence[int]) -> bool:
        """Whether all of these are."""
        return self._harmless.issuperset(tokens) or all(map(self._is_harmless, tokens))

    def _is_harmless(self, token: int) -> bool:
        if token in self._harmless:
            return True
        if token in self._others:
            return False
        try:
            text = self._tokenizer.token_bytes(token).decode()
        except UnicodeDecodeError:
            text = None
        is_harmless = text is not None and self._first_characters.isdisjoint(text)
        (self._harmless if is_harmless else self._others).add(token)
        return is_harmless


class StopWatches:
    """Makes the watches of sequences, which share what they learn of tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._harmless = lru_cache(MOST_SETS)(self._learning)

    def watch(self, sampling: SamplingParams) -> StopWatch:
        """What looks for the stop strings of one sequence."""
        first_characters = frozenset(text[0] for text in sampling.stop)
        return StopWatch(sampling, self._tokenizer, self._harmless(first_characters))

    def _learning(self, first_characters: frozenset[str]) -> HarmlessTokens:
        return HarmlessTokens(self._tokenizer, first_characters)
