"""Which drafts a step tests: confidence-scheduled verification (spec/dspark 4).

Draft j of sequence r is committed with the probability a[r][j], its survival, if it is tested. A
step that tests K drafts of R sequences commits R + the sum of their survivals on average, in
seconds(K), and what is wanted is tokens a second. Survivals fall along a sequence, so the K
likeliest candidates are prefixes, and only K has to be chosen.

The choice must not change what is generated. Draft j + 1's confidence depends on what draft j is,
so whether j is tested may depend on survivals up to its own and on no later one. For whatever
survivals, `early_stop_widths` and `widths_within` keep to that. `best_budget` does not, hence its
survivals must be those of earlier drafts: two steps old, they are on the host in time.

`seconds(K)` is the time of the whole step with K drafts tested: the target's, whose batch may hold
prompts too, and the drafter's.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from operator import ge

Survivals = Sequence[Sequence[float]]  # of each sequence, for as many drafts as may be tested
Seconds = Callable[[int], float]


def early_stop_widths(survivals: Survivals, seconds: Seconds) -> list[int]:
    """How many drafts of each sequence to test, from the survivals of these very drafts.

    Takes candidates from the likeliest on, as long as each one makes the step faster. It stops at
    the first that does not, though a later one might: to look further is to let a draft decide
    whether it is tested itself. This is the best choice where each further draft costs at least as
    much as the one before; on a staircase of costs it may stop before a step that pays.

    Raises ValueError for survivals that rise or are no probabilities.
    """
    if not survivals:
        return []
    widths = [0] * len(survivals)
    tokens = float(len(survivals))
    best = tokens / seconds(0)
    for tested, (survival, place, sequence) in enumerate(_ranked(survivals), start=1):
        tokens += survival
        rate = tokens / seconds(tested)
        if rate <= best:
            break
        best = rate
        widths[sequence] = place
    return widths


def best_budget(
    survivals: Survivals, seconds: Seconds, most: int | None = None
) -> tuple[int, float]:
    """How many drafts a step should test, at `most` if that is given, and its tokens a second.

    The best of all numbers, the smallest of them where several are. The survivals must be those of
    earlier drafts, or a draft has a say in whether it is tested.

    Raises ValueError for survivals that rise or are no probabilities.
    """
    if not survivals:
        return 0, 0.0
    check_survivals(survivals)
    likeliest = sorted(chain.from_iterable(survivals), reverse=True)[:most]
    tokens = accumulate(likeliest, initial=float(len(survivals)))
    rates = [expected / seconds(tested) for tested, expected in enumerate(tokens)]
    budget = max(range(len(rates)), key=rates.__getitem__)
    return budget, rates[budget]


def widths_within(survivals: Survivals, budget: int) -> list[int]:
    """How many drafts of each sequence to test if all together may test `budget`: the likeliest.

    Of equals the lower place goes first, then the earlier sequence: a survival that saturates at
    its predecessor's must not overtake it. Drafts that cannot survive are not tested.
    `minimax_jax.speculative.budget` does the same on the device.

    Raises ValueError for survivals that rise or are no probabilities, and for a negative budget.
    """
    if budget < 0:
        raise ValueError(f"a budget of {budget} drafts is negative")
    widths = [0] * len(survivals)
    for _, place, sequence in _ranked(survivals)[:budget]:
        widths[sequence] = place
    return widths


def check_survivals(survivals: Survivals) -> None:
    """Raises ValueError for survivals that rise along a sequence or are no probabilities."""
    for sequence, row in enumerate(survivals):
        if not all(map(ge, (1.0, *row), (*row, 0.0))):
            raise ValueError(
                f"survivals {list(row)} of sequence {sequence} do not fall between 1 and 0"
            )


def _ranked(survivals: Survivals) -> list[tuple[float, int, int]]:
    """(survival, place from 1, sequence) of all candidates, in the order they are taken in."""
    check_survivals(survivals)
    keys = sorted(
        (-survival, place, sequence)
        for sequence, row in enumerate(survivals)
        for place, survival in enumerate(row, start=1)
        if survival > 0
    )
    return [(-key, place, sequence) for key, place, sequence in keys]
