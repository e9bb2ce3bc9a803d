"""The jitted steps draw from the target's law: a small model over eight tokens, its drafter, their
pages, against the exact law that packed scoring gives. `test_law` holds the law itself to more.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import chi2

from minimax_jax.batch import Batch, pack
from minimax_jax.sampling import History, SamplingParams, SamplingState
from minimax_jax.speculative.steps import SpeculationOptions, speculate, start
from minimax_jax.steps import DecodeState, prefill, score
from tests.drafter.models import Z, drafted, empty_cache, random_drafter
from tests.model.models import random_model, small
from tests.sampling.reference import Case, law

pytestmark = pytest.mark.slow

V, B, RUNS, WIDTH = 8, 512, 16, 3
CONFIG = drafted(small(num_tokens=V))
MODEL, DRAFTER = random_model(CONFIG), random_drafter(CONFIG)
PROMPT = np.random.default_rng(0).integers(0, V, Z)  # one block, which all sequences share
TABLE = jnp.stack([jnp.zeros(B, jnp.int32), jnp.arange(1, B + 1)], axis=1)
OPTIONS = SpeculationOptions(rows=B * (WIDTH + 1))
PLAIN = SamplingParams(temperature=2.0)
PENALISED = SamplingParams(
    temperature=2.0,
    presence_penalty=1.0,
    frequency_penalty=0.7,
    repetition_penalty=1.3,
    bad_words=((5, 2), (1, 1, 1)),
    logit_bias={4: 1.0},
)


def exact_law(params: SamplingParams) -> np.ndarray:
    """The probability of each three tokens after the prompt, [8, 8, 8], in one pack of 64."""
    ends = np.stack(np.meshgrid(np.arange(V), np.arange(V), indexing="ij"), -1).reshape(-1, 2)
    rows = np.concatenate([np.broadcast_to(PROMPT, (V * V, Z)), ends], axis=1)
    segments = np.repeat(np.arange(V * V), rows.shape[1])
    batch, places = pack(rows.ravel(), segments, Z)
    layout = empty_cache(CONFIG, 1).layout
    logits = np.asarray(score(MODEL, None, batch, layout), np.float64).reshape(-1, 512)[places]
    logits = logits.reshape(V, V, Z + 2, 512)[:, :, -3:, :V]

    def p(*output: int) -> np.ndarray:
        one = logits[(*output, 0, 0)[:2]][len(output)]
        return law(Case(logits=one, params=params, prompt=tuple(PROMPT.tolist()), output=output))

    first = p()
    second = np.stack([p(a) for a in range(V)])
    third = np.stack([[p(a, b) for b in range(V)] for a in range(V)])
    return first[:, None, None] * second[:, :, None] * third


def prompted():
    """The cache with the prompt in block 0, and the logits after it."""
    ids = jnp.arange(Z)
    batch = Batch(tokens=jnp.asarray(PROMPT)[None], positions=ids[None], block_table=TABLE[:1])
    last, logits = jnp.array([Z - 1]), jnp.zeros((1, CONFIG.vocab_size))
    return prefill(MODEL, None, empty_cache(CONFIG, B + 1), batch, last, logits, DRAFTER)


def sampled(run: int, params: SamplingParams) -> SamplingState:
    """A state of B sequences with seeds of their own."""
    one = SamplingState.of([params], [Z], CONFIG.vocab_size)
    many = jax.tree.map(lambda x: jnp.repeat(x, B, axis=0), one)
    seeds = jnp.stack([jnp.full(B, run), jnp.arange(B)], axis=1)
    return replace(many, seed=seeds.astype(jnp.uint32))


def three_tokens(cache, logits, sampling: SamplingState):
    """Three tokens of B sequences [B, 3], how many drafts were tested and accepted, the cache."""
    positions = jnp.full(B, Z)
    state = DecodeState(
        logits=jnp.repeat(logits, B, axis=0),
        positions=positions,
        limits=positions + Z,
        running=positions > 0,
        history=History.of(sampling, [PROMPT.tolist()] * B, [[]] * B, CONFIG.vocab_size),
    )
    widths = jnp.full(B, WIDTH)
    begun, first = start(MODEL, DRAFTER, cache, TABLE, state, sampling, OPTIONS)
    found, counts = [first.tokens[None]], np.zeros(2, int)
    for _ in range(2):
        args = cache, TABLE, begun, widths, sampling, OPTIONS
        cache, begun, done = speculate(MODEL, DRAFTER, None, *args)
        found.append(done.generated.tokens)
        counts += int(done.tested.sum()), int(done.accepted.sum())
    rows = np.concatenate(found).T
    return np.stack([row[row >= 0][:3] for row in rows]), counts, cache


@pytest.mark.parametrize("params", [PLAIN, PENALISED], ids=["plain", "penalised"])
def test_three_tokens_of_the_steps_have_the_targets_law(params):
    """F104."""
    cache, logits = prompted()
    observed, counts = np.zeros(V**3), np.zeros(2, int)
    for run in range(RUNS):
        tokens, some, cache = three_tokens(cache, logits, sampled(run, params))
        observed += np.bincount(tokens @ [V * V, V, 1], minlength=V**3)
        counts += some
    expected = exact_law(params).ravel() * B * RUNS
    assert not observed[expected == 0].any(), "a forbidden token was committed"
    rate = counts[1] / counts[0]
    assert 0.1 < rate < 0.9, f"{rate} of the drafts are accepted: too few or many to tell"
    common = expected >= 5
    observed, expected = (np.append(x[common], x[~common].sum()) for x in (observed, expected))
    statistic = ((observed - expected) ** 2 / expected).sum()
    value = float(chi2.sf(statistic, len(observed) - 1))
    print(f"{len(observed)} cells, chi-square {statistic:.0f}, p {value:.3f}, accepted {rate:.2f}")
    assert value >= 1e-4
