"""How often drafts are accepted, learnt from what became of them: for drafters without a confidence
head, and for requests that have shown no confidences yet (spec/dspark 4.4).

An estimate depends on past outcomes only, so any choice made by it leaves the law alone.
"""

from collections.abc import Iterable
from itertools import accumulate
from operator import mul

DISCOUNT = 0.99  # a step: outcomes count for about a hundred steps
PRIOR = 1.0  # trials that an estimate starts with


class AcceptanceEstimator:
    """For each place of a block: the share of drafts that were accepted, of those that were tested
    and whose predecessors were accepted. Old steps count less and less.

    A place that has seen little is taken to be like the place before it, and the first one to be
    certain. So a new estimator tests everything, and one that has ended testing comes back to it:
    as its memory fades the estimate rises until a test pays again.
    """

    def __init__(self, num_drafts: int, *, discount: float = DISCOUNT, prior: float = PRIOR):
        if num_drafts < 1:
            raise ValueError(f"num_drafts={num_drafts} is not at least 1")
        if not 0 < discount < 1:
            raise ValueError(f"discount={discount} is not between 0 and 1")
        if prior <= 0:
            raise ValueError(f"prior={prior} trials are not positive")
        self._discount, self._prior = discount, prior
        self._trials, self._accepted = [0.0] * num_drafts, [0.0] * num_drafts
        self._conditional = (1.0,) * num_drafts

    def observe(self, outcomes: Iterable[tuple[int, int]]) -> None:
        """One step's outcomes: of each sequence how many drafts were tested and how many accepted.

        A step without tests counts as one, too: it makes the memory older.
        Raises ValueError for an impossible outcome, and then counts nothing.
        """
        outcomes = list(outcomes)
        for tested, accepted in outcomes:
            if not 0 <= accepted <= tested <= len(self._trials):
                raise ValueError(
                    f"{accepted} of {tested} drafts accepted: not 0 <= accepted <= tested <= "
                    f"{len(self._trials)}"
                )
        for counts in (self._trials, self._accepted):
            counts[:] = [self._discount * count for count in counts]
        for tested, accepted in outcomes:
            for place in range(accepted):
                self._accepted[place] += 1
            for place in range(min(tested, accepted + 1)):  # those after a rejected one are untried
                self._trials[place] += 1
        self._conditional = self._estimated()

    @property
    def conditional(self) -> tuple[float, ...]:
        """The probability that each draft is accepted if all before it are."""
        return self._conditional

    @property
    def survival(self) -> tuple[float, ...]:
        """The probability that each draft is accepted, together with all before it."""
        return tuple(accumulate(self.conditional, mul))

    def _estimated(self) -> tuple[float, ...]:
        rates, rate = [], 1.0
        for trials, accepted in zip(self._trials, self._accepted, strict=True):
            rate = (accepted + self._prior * rate) / (trials + self._prior)
            rates.append(rate)
        return tuple(rates)
