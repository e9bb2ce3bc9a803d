"""The rows of a verification, and what it commits, by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.speculation import Verdict
from minimax_jax.speculative.commit import Anchors, commit
from minimax_jax.speculative.verify_rows import fitting_widths, verify_rows

WIDTHS = jnp.array([2, 0, 3, 1])
RUNNING = jnp.array([True, True, False, True])
CHAIN = jnp.arange(16).reshape(4, 4) + 100  # three drafts
ANCHORS = jnp.array([10, 20, 30, 40])
TABLE = jnp.arange(8).reshape(4, 2)


def test_packed_rows_follow_one_another():
    rows = verify_rows(WIDTHS, RUNNING, 8, 3)
    assert rows.sequences[:6].tolist() == [0, 0, 0, 1, 3, 3]
    assert rows.offsets.tolist() == [0, 1, 2, 0, 0, 1, -1, -1]
    assert rows.first[jnp.array([0, 1, 3])].tolist() == [0, 3, 4]
    batch = rows.batch(CHAIN, ANCHORS, TABLE)
    assert batch.tokens[:6, 0].tolist() == [100, 101, 102, 104, 112, 113]
    assert batch.positions[:, 0].tolist() == [10, 11, 12, 20, 40, 41, -1, -1]
    assert batch.block_table[:6].tolist() == TABLE[jnp.array([0, 0, 0, 1, 3, 3])].tolist()


def test_with_room_for_all_each_sequence_is_a_tile():
    rows = verify_rows(WIDTHS, RUNNING, 16, 3)
    batch = rows.batch(CHAIN, ANCHORS, TABLE)
    assert batch.positions.tolist() == [
        [10, 11, 12, -1],
        [20, -1, -1, -1],
        [-1, -1, -1, -1],
        [40, 41, -1, -1],
    ]
    assert batch.block_table is TABLE and rows.first.tolist() == [0, 4, 8, 12]
    assert (batch.tokens == CHAIN)[batch.positions >= 0].all()


@pytest.mark.parametrize(
    ("rows", "most", "expected"),
    [
        (16, 9, [2, 0, 0, 1]),
        (6, 9, [2, 0, 0, 1]),
        (5, 9, [2, 0, 0, 0]),
        (4, 9, [1, 0, 0, 0]),  # three anchors run, so one row is spare
        (16, 1, [1, 0, 0, 1]),
        (16, -1, [0, 0, 0, 0]),
    ],
)
def test_widths_fit_the_rows_and_the_limits(rows, most, expected):
    found = fitting_widths(WIDTHS, RUNNING, jnp.full(4, most), rows)
    assert found.tolist() == expected


def test_too_few_rows_for_the_anchors_are_refused():
    with pytest.raises(ValueError, match="3 rows are fewer than one for each of 4 sequences"):
        fitting_widths(WIDTHS, RUNNING, WIDTHS, 3)


def committed(accepted, token, going=True, stop_ids=(), drafts=(11, 12, 13)):
    verdict = Verdict(accepted=jnp.array([accepted]), token=jnp.array([token]))
    return commit(jnp.array([drafts]), verdict, jnp.array([going]), jnp.array([[-1, *stop_ids]]))


@pytest.mark.parametrize("accepted", range(4))
def test_kept_drafts_and_the_token_after_them_are_committed(accepted):
    found = committed(accepted, 50)
    wanted = [*[11, 12, 13][:accepted], 50]
    assert found.tokens[0].tolist() == wanted + [-1] * (4 - len(wanted))
    assert (int(found.count[0]), int(found.accepted[0])) == (accepted + 1, accepted)


def test_a_stop_token_among_kept_drafts_ends_the_sequence_there():
    found = committed(3, 50, stop_ids=(12, 50))
    assert found.tokens[0].tolist() == [11, 12, -1, -1]
    assert (int(found.count[0]), int(found.accepted[0]), bool(found.stopped[0])) == (2, 2, True)


def test_a_stop_token_among_rejected_drafts_is_none():
    found = committed(1, 50, stop_ids=(12,))
    assert found.tokens[0].tolist() == [11, 50, -1, -1] and not found.stopped[0]


def test_a_stop_token_after_the_drafts_ends_the_sequence():
    found = committed(1, 50, stop_ids=(50,))
    assert found.tokens[0].tolist() == [11, 50, -1, -1] and found.stopped[0]


def test_nothing_is_committed_of_what_does_not_run():
    found = committed(3, 50, going=False, stop_ids=(11,))
    assert found.tokens[0].tolist() == [-1] * 4 and not found.stopped[0]
    assert int(found.count[0]) == 0


def test_the_rows_of_committed_tokens_are_kept():
    """The anchor's and the kept drafts'; the last token has not been run; none if none is new."""
    rows = verify_rows(jnp.array([3, 3, 3]), jnp.array([True] * 3), 12, 3)
    verdict = Verdict(accepted=jnp.array([1, 3, 2]), token=jnp.array([50, 50, 50]))
    drafts = jnp.array([[11, 12, 13]] * 3)
    found = commit(drafts, verdict, jnp.array([True, True, False]), jnp.full((3, 1), 12))
    kept = np.asarray(found.keeps(rows)).reshape(3, 4).tolist()
    assert kept == [[True, True, False, False], [True, True, True, False], [False] * 4]


def test_the_next_anchor_is_the_last_committed_token():
    before = Anchors(
        tokens=jnp.array([1, 2, 3, 4]),
        positions=jnp.array([10, 10, 10, 10]),
        limits=jnp.array([20, 13, 20, 20]),
        running=jnp.array([True, True, True, False]),
    )
    assert before.room.tolist() == [8, 1, 8, 8]
    verdict = Verdict(accepted=jnp.array([2, 1, 3, 0]), token=jnp.array([50, 51, 52, 53]))
    found = commit(jnp.array([[11, 12, 13]] * 4), verdict, before.running, jnp.full((4, 1), 13))
    after = found.anchors(before)
    assert after.tokens.tolist() == [50, 51, 13, 4]
    assert after.positions.tolist() == [13, 12, 13, 10]
    # the second has reached its limit, the third has stopped, the fourth did not run
    assert after.running.tolist() == [True, False, False, False]
