"""The schedule of block scores: every page before an item's newest block once, in equal shares."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_select import schedule
from pallas_kernels.block_select.schedule import IDS, ITEM, PAGE, STEP

Z, P, PROGRAMS = 128, 41, 7


def _make(lengths, queries, heads):
    rng = np.random.default_rng(0)
    positions = np.maximum(np.asarray(lengths)[:, None] - queries + np.arange(queries), -1)
    table = rng.permutation(len(lengths) * P).reshape(-1, P).astype(np.int32)
    plan = schedule.make(
        jnp.asarray(positions, jnp.int32),
        jnp.asarray(table),
        heads=heads,
        block_size=Z,
        programs=PROGRAMS,
    )
    return positions, table, np.asarray(plan.counts), np.asarray(plan.entries)


def _newest(positions, heads):
    """The pages that each item needs, by a loop over its rows."""
    batch, queries = positions.shape
    rows = queries * heads
    size, items = schedule.rows_of_item(rows), schedule.items_of_sequence(rows)
    needed = np.zeros(batch * items, int)
    for b, row in np.ndindex(batch, rows):
        item = b * items + row // size
        needed[item] = max(needed[item], positions[b, row // heads] // Z)
    return needed, items


@pytest.mark.parametrize("queries", [1, 3, 8, 130])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_every_needed_page_is_scored_once(queries, heads):
    """F68: a short context has few steps, one of padding none."""
    positions, table, counts, entries = _make([1, 129, 5000, 0, 700, 128, 127], queries, heads)
    needed, items = _newest(positions, heads)
    seen = []
    for program, count in enumerate(counts):
        for entry in entries[program, :count]:
            for i, block in enumerate(entry[IDS : IDS + STEP]):
                item, page = entry[ITEM], entry[PAGE] + i
                expected = table[item // items, page] if page < needed[item] else -1
                assert block == expected
                seen += [(item, page)] if block >= 0 else []
    assert sorted(seen) == [(i, page) for i, n in enumerate(needed) for page in range(n)]


def test_programs_get_equal_shares():
    _, _, counts, _ = _make([5000, 5000, 300], 1, 4)
    assert counts.sum() == 2 * 10 + 1 and counts.max() - counts.min() <= 1


def test_a_batch_of_padding_has_no_steps():
    _, _, counts, _ = _make([0, 0], 4, 1)
    assert (counts == 0).all()
