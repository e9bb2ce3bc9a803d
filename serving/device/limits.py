"""What one row can hold of a request's lists: the tables on the device have these widths, so that
no request is a reason to compile.
"""

from dataclasses import dataclass

from minimax_jax.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class RowLimits:
    """The widths; 256 slots take 3.5 MB for them. OpenAI allows 300 biases. Of the stop ids `own`
    are kept for the model's ends, which requests do not name.
    """

    stop_ids: int = 64
    own: int = 16
    biases: int = 1024
    words: int = 64
    word_length: int = 16

    def check(self, params: SamplingParams, most_stops: int) -> None:
        """Raises ValueError with a sentence for options that no row can hold."""
        longest = max(map(len, params.bad_words), default=0)
        for name, size, most in (
            ("stop_token_ids has", len(params.stop_token_ids), most_stops),
            ("logit_bias has", len(params.logit_bias), self.biases),
            ("bad_words has, spelled as tokens,", len(params.bad_words), self.words),
            ("the longest of bad_words has", longest, self.word_length),
        ):
            if size > most:
                raise ValueError(f"{name} {size} entries, and {most} is the most")


LIMITS = RowLimits()
