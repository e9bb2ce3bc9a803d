"""Tokens have the target's law also where confidences choose what is tested: the choice of
`speculative.budget` among sequences that share a budget, and two choices that must not be made.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.speculative.budget import survivals, widths_within
from tests.speculation.test_law import LEVEL, p_value
from tests.speculation.toy import VOCABULARY, Setting

pytestmark = pytest.mark.slow

SHARING = 8  # sequences of one batch
# The confidence in a draft, by its place and by the token before it: it tells the drafts apart.
CONFIDENCE = jnp.asarray(np.random.default_rng(1).normal(0.5, 2, (7, VOCABULARY)), jnp.float32)


def scheduled(chain, *, budget: int, looks_ahead: int = 0):
    """Widths [B] within the budget of each batch; by the draft itself if it `looks_ahead`."""
    drafts = chain.shape[1] - 1
    places, before = jnp.arange(drafts), chain[:, looks_ahead : looks_ahead + drafts]
    survival = survivals(CONFIDENCE[places, before], jnp.ones(drafts))
    batches = survival.reshape(-1, SHARING, drafts)
    room = jnp.full(SHARING, drafts)
    choose = jax.vmap(lambda batch: widths_within(batch, room, jnp.int32(budget)))
    return choose(batches).reshape(-1)


def anticipating(chain):
    """All drafts, or none if the last is unlikely to survive: what a search past a dip may find."""
    drafts = chain.shape[1] - 1
    survival = survivals(CONFIDENCE[jnp.arange(drafts), chain[:, :drafts]], jnp.ones(drafts))
    return jnp.where(survival[:, -1] > 0.3, drafts, 0)


@pytest.mark.parametrize(
    ("setting", "budget"),
    [
        (Setting(), 12),
        (Setting(temperature=2.0), 30),
        (Setting(temperature=0.5, top_p=0.9), 3),
        (Setting(width=2), 6),
    ],
    ids=str,
)
def test_scheduled_tokens_have_the_targets_law(setting, budget):
    assert p_value(setting, partial(scheduled, budget=budget)) >= LEVEL


def test_a_confidence_that_sees_the_draft_itself_is_noticed():
    assert p_value(Setting(width=2), partial(scheduled, budget=6, looks_ahead=1)) < LEVEL


def test_a_schedule_that_looks_at_the_last_draft_first_is_noticed():
    assert p_value(Setting(width=2), anticipating) < LEVEL
