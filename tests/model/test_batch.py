"""Packing segments into tiles, and where a batch's tokens go in the pool."""

import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.batch import Batch, pack
from tests.numerics import assert_close

Z = 4
SEGMENTS = np.array([7] * 6 + [2] * 4 + [5] * 1 + [-1] * 2)
TOKENS = np.arange(100, 113)


def _packed():
    batch, places = pack(TOKENS, SEGMENTS, Z)
    return (np.asarray(x) for x in (batch.tokens, batch.positions, batch.block_table, places))


def test_each_segment_starts_on_a_tile_of_its_own():
    tokens, positions, _, _ = _packed()
    first = [100, 104, 106, 110]
    assert tokens[:4, 0].tolist() == first and positions[:4, 0].tolist() == [0, 4, 0, 0]


def test_positions_count_from_each_segments_start():
    _, positions, _, _ = _packed()
    expected = [[0, 1, 2, 3], [4, 5, -1, -1], [0, 1, 2, 3], [0, -1, -1, -1]]
    assert positions[:4].tolist() == expected


def test_a_tiles_table_names_the_tiles_of_its_segment():
    _, _, table, _ = _packed()
    assert table[:4].tolist() == [[0, 1], [0, 1], [2, -1], [3, -1]]


def test_places_find_each_token_again():
    tokens, positions, _, places = _packed()
    real = SEGMENTS != -1
    assert_close(tokens.reshape(-1)[places][real].astype(TOKENS.dtype), TOKENS[real], "exact")
    assert len(set(places)) == len(places)
    assert (positions.reshape(-1)[places][real] >= 0).all()


def test_padding_ids_get_position_minus_one():
    _, positions, _, places = _packed()
    assert (positions.reshape(-1)[places][SEGMENTS == -1] == -1).all()
    assert (positions >= 0).sum() == (SEGMENTS != -1).sum()


def test_padding_may_lie_between_segments():
    batch, places = pack(TOKENS[:7], np.array([0, 0, -1, 1, 1, -1, -1]), Z)
    positions = np.asarray(batch.positions).reshape(-1)[places]
    assert positions.tolist() == [0, 1, -1, 0, 1, -1, -1]


def test_one_segment_of_whole_tiles_has_no_padding():
    batch, places = pack(np.arange(8), np.zeros(8, int), Z)
    assert batch.positions.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batch.block_table.tolist() == [[0, 1], [0, 1]]
    assert places.tolist() == list(range(8))


def test_a_segment_that_comes_back_is_refused():
    sentence = "^a segment id comes back after another segment: segments must be contiguous$"
    with pytest.raises(ValueError, match=sentence):
        pack(TOKENS[:3], np.array([0, 1, 0]), Z)


def test_arrays_of_unequal_length_are_refused():
    sentence = r"^tokens \(4,\) and segment_ids \(3,\) are not one \[T\]$"
    with pytest.raises(ValueError, match=sentence):
        pack(TOKENS[:4], np.array([0, 0, 0]), Z)


def test_a_batch_of_rows_is_refused():
    with pytest.raises(ValueError, match=r"are not one \[T\]$"):
        pack(TOKENS[:4].reshape(2, 2), np.zeros((2, 2), int), Z)


def test_an_empty_pack_is_refused():
    with pytest.raises(ValueError, match="^a pack of no tokens has no tiles$"):
        pack(TOKENS[:0], SEGMENTS[:0], Z)


def _batch(positions, table):
    positions = jnp.asarray(positions)
    return Batch(
        tokens=jnp.zeros_like(positions), positions=positions, block_table=jnp.asarray(table)
    )


def test_slots_follow_the_block_table():
    slots = _batch([[3, 4], [9, 10]], [[7, 2, 9], [0, 1, 5]]).slots(Z)
    assert slots.block_ids.tolist() == [7, 2, 5, 5] and slots.places.tolist() == [3, 0, 1, 2]


def test_padding_and_positions_without_a_block_are_written_nowhere():
    slots = _batch([[-1, 4], [12, 400]], [[7, -1, 9], [0, 1, 5]]).slots(Z)
    assert all(block < 0 for block in slots.block_ids.tolist())
