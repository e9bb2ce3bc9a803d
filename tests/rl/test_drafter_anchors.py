"""Where blocks start and what they are asked for, by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from rl.draft_anchors import NO_ANCHOR, DraftBlocks, choose_anchors
from rl.packing import Example, PackShape, pack_examples

SHAPE = PackShape(tiles=6, tile_tokens=4, blocks=3)


def example(first: int, learned: str) -> Example:
    """Tokens first, first + 1, ...; those marked x are of an answer."""
    marks = np.array([mark == "x" for mark in learned])
    return Example(first + np.arange(len(marks), dtype=np.int32), marks)


# places 0..9 (tiles 0-2) and 12..18 (tiles 3-4); an answer of 4, one of 2, one of 5
PACK = pack_examples([[example(100, "..xxxx..xx"), example(200, "..xxxxx")]], SHAPE)
CANDIDATES = [2, 3, 4, 8, 14, 15, 16, 17]


def chosen(seed=0, per_sequence=512, total=10):
    rng = np.random.default_rng(seed)
    return choose_anchors(PACK, rng, per_sequence=per_sequence, total=total).tolist()


def test_anchors_are_answer_tokens_that_another_follows():
    assert chosen() == [*CANDIDATES, NO_ANCHOR, NO_ANCHOR]


def test_a_sequence_gives_no_more_than_its_share():
    found = [chosen(seed, per_sequence=3) for seed in range(50)]
    for anchors in found:
        real = [a for a in anchors if a != NO_ANCHOR]
        assert real == sorted(set(real)) and set(real) <= set(CANDIDATES)
        assert sum(a < 12 for a in real) == sum(a >= 12 for a in real) == 3
    counts = np.bincount(np.concatenate(found)[np.concatenate(found) >= 0], minlength=18)
    assert (counts[CANDIDATES] > 20).all()  # 37.5 expected of each


def test_a_step_takes_no_more_than_its_total_from_anywhere():
    found = np.array([chosen(seed, total=4) for seed in range(50)])
    assert (found >= 0).all() and (np.diff(found) > 0).all()
    assert set(found.ravel().tolist()) == set(CANDIDATES)


def blocks_at(*anchors, rows=3):
    pack = type(PACK)(**{name: jnp.asarray(value) for name, value in vars(PACK).items()})
    return DraftBlocks.of(pack, jnp.asarray(anchors), rows)


def test_a_block_is_asked_for_the_tokens_after_its_anchor():
    block = blocks_at(14)
    assert block.positions.tolist() == [2]
    assert block.block_table.tolist() == [[3, 4, -1]]
    assert block.previous.tolist() == [[202, 203, 204]]
    assert block.labels.tolist() == [[203, 204, 205]]
    assert block.teachers.tolist() == [[14, 15, 16]]
    assert block.valid.tolist() == [[True, True, True]]


@pytest.mark.parametrize(
    ("anchor", "valid"),
    [
        (3, [True, True, False]),  # the next question
        (4, [True, False, False]),
        (8, [True, False, False]),  # the end of the sequence; another one follows in the pack
        (17, [True, False, False]),  # the end of the last sequence
        (NO_ANCHOR, [False, False, False]),
    ],
)
def test_a_block_ends_with_the_answer(anchor, valid):
    block = blocks_at(anchor)
    assert block.valid.tolist() == [valid]
    assert (int(block.positions[0]) == -1) == (anchor == NO_ANCHOR)


def test_a_block_does_not_go_on_in_the_next_answer():
    assert blocks_at(4, rows=6).valid.tolist() == [[True] + [False] * 5]
