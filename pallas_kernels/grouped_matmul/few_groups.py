"""The groups of at most 32 (token, choice) pairs, by the warp that needs them: one for each expert
that is met, in the order in which it is first met; a lane has a pair.

Place 8 g + t is token t's with the expert of group g, so that no ranks are needed: all tokens have
a place in every group, most of them nobody's.
"""

import functools
from collections.abc import Callable
from typing import Any

from pallas_kernels import lanes
from pallas_kernels.grouped_matmul.grouping import EIGHT
from pallas_kernels.lanes import REF, SCALAR, Word

MOST_PAIRS = 32  # a warp's lanes
COUNT = MOST_PAIRS  # where the number of groups stands, after the experts
LIST = 64  # words of the list


def list_groups(pairs: int, experts: int) -> Callable:
    """A function of (ids, list, team): the first warp of team 0 writes the experts of the groups,
    and how many there are, to shared memory.
    """

    @lanes.code(REF, REF, SCALAR)
    def run(_, ids, found, team):
        def write():
            id_, group, leads, leaders = _groups(ids, pairs, experts)
            target = lanes.address(found)
            lanes.when(leads, lambda: lanes.store_words(target, group << 2, [id_]))
            count = lanes.count_bits(leaders)
            is_first = lanes.lane().equals(0)
            lanes.when(is_first, lambda: lanes.store_words(target, COUNT << 2, [count]))

        lanes.when((lanes.warp() + lanes.scalar(team)).equals(0), write)

    return run


def store_places(pairs: int, experts: int, choices: int, places: int) -> Callable:
    """A function of (ids, out, one): where `one` is 0, the first warp writes each pair's place to
    memory; `places` where its expert is not here.
    """

    @lanes.code(REF, REF, SCALAR)
    def run(_, ids, out, one):
        def write():
            group = _groups(ids, pairs, experts)[1]
            token = lanes.lane() // choices
            known = _in_range(_id(ids, pairs), experts)
            at = lanes.select(known, group * EIGHT + token, lanes.word(places))
            store = functools.partial(
                lanes.store_words, lanes.address(out), lanes.lane() << 2, [at]
            )
            lanes.when(lanes.lane().below(pairs), store)

        lanes.when((lanes.warp() + lanes.scalar(one)).equals(0), write)

    return run


def _groups(ids: Any, pairs: int, experts: int) -> tuple[Word, Word, Any, Word]:
    """This lane's expert, its group, whether it is the group's first lane, and all first lanes."""
    id_ = _id(ids, pairs)
    alike = lanes.lanes_alike(id_)
    is_first = (alike & lanes.lanes_before()).equals(0)
    leads = lanes.both(is_first, _in_range(id_, experts))
    leaders = lanes.lanes_where(leads)
    lowest = alike & (alike * -1)
    return id_, lanes.count_bits(leaders & (lowest + -1)), leads, leaders


def _id(ids: Any, pairs: int) -> Word:
    """-1 in lanes that have no pair."""
    inside = lanes.lane().below(pairs)
    at = lanes.select(inside, lanes.lane(), lanes.word(0))
    (id_,) = lanes.load_words(lanes.address(ids), at << 2, 1)
    return lanes.select(inside, id_, lanes.word(-1))


def _in_range(id_: Word, experts: int) -> Any:
    return lanes.negate(id_.above(experts - 1))
