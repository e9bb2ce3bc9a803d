"""Stop strings of a sequence, looked for in its text wherever its tokens end."""

from collections.abc import Sequence

from minimax_jax.chat import StopMatch, TextStream, Tokenizer
from serving.scheduling.sampling_params import SamplingParams


class StopWatch:
    """Reads a sequence's tokens up to the one that completes a stop string.

    Tokens that may be part of one are to be told together with what decides it, so that whoever
    reads the text of the last tokens alone can cut the stop string off.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams):
        self._stream = TextStream(
            tokenizer, stop=sampling.stop, min_tokens=sampling.min_tokens, include_stop=True
        )

    @property
    def match(self) -> StopMatch | None:
        """The stop string that was met."""
        return self._stream.match

    @property
    def num_certain(self) -> int:
        """How many of the sequence's tokens no stop string can reach any more."""
        return self._stream.num_certain_tokens

    def read(self, tokens: Sequence[int]) -> int | None:
        """Takes tokens; how many there are up to the one that completes a stop string, if any."""
        for count, token in enumerate(tokens, start=1):
            self._stream.push(token)
            if self._stream.match is not None:
                return count
        return None

    def end(self) -> None:
        """Ends the text; an unfinished character, now U+FFFD, may complete a stop string."""
        self._stream.finish()
