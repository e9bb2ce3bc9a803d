"""A toy target and a toy drafter over eight tokens, decoded speculatively by the project's own law.

The target's logits depend on the token before; the drafter's on that and on the row of its block,
so that they are wrong in another way at each row. The exact law of three tokens is a product.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from minimax_jax import speculation
from minimax_jax.sampling import DRAFT, SamplingParams, SamplingState, sample
from minimax_jax.speculative.drafting import DraftMethod, draft_sampling
from tests.speculation.tables import verify

VOCABULARY, LENGTH, ANCHOR = 8, 3, 2
_RNG = np.random.default_rng(2024)
TARGET = jnp.asarray(0.6 * _RNG.normal(size=(VOCABULARY, VOCABULARY)), jnp.float32)
DRAFT_LOGITS = jnp.asarray(
    TARGET + 0.9 * _RNG.normal(size=(7, VOCABULARY, VOCABULARY)), jnp.float32
)

Schedule = Callable[[jax.Array], jax.Array]  # anchors and drafts [B, 1 + T] -> widths [B]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How all sequences of a run are sampled and drafted."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    width: int = 7
    ragged: bool = False  # each sequence tests its own number of drafts, 0 to `width`
    method: DraftMethod = "probabilistic"
    drafted_at: float = 1.0  # times the temperature that q is computed at: only a fault is not 1
    fault: str = ""  # a name for what is patched in, so that it is compiled apart


def states(setting: Setting, count: int) -> SamplingState:
    """`count` sequences with a seed each."""
    params = SamplingParams(
        temperature=setting.temperature, top_p=setting.top_p, top_k=setting.top_k
    )
    one = SamplingState.of([params])
    state = jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), one)
    seeds = jnp.stack([jnp.full(count, 77), jnp.arange(count)], axis=1).astype(jnp.uint32)
    return replace(state, seed=seeds)


def decoded(setting: Setting, count: int, schedule: Schedule | None = None) -> np.ndarray:
    """How often each sequence of three tokens came out of speculative decoding: [8, 8, 8].

    A `schedule` says how many drafts each sequence tests, instead of the setting.
    """
    sampling = states(setting, count)
    widths = jnp.full(count, setting.width)
    if setting.ragged:
        widths = jnp.asarray(np.random.default_rng(5).integers(0, setting.width + 1, count))

    # what a program depends on; temperature and cuts are arguments
    shape = replace(setting, temperature=1.0, top_p=1.0, top_k=0, ragged=False)
    step = jax.jit(_step, static_argnums=(0, 1))
    # one column more than the longest, into which what is beyond the end is written
    tokens = jnp.full((count, LENGTH + 2), ANCHOR)
    lengths = jnp.zeros(count, jnp.int32)  # tokens after the anchor
    for _ in range(LENGTH):  # each commits at least one
        tokens, lengths = step(shape, schedule, sampling, widths, tokens, lengths)
    cells = np.asarray(tokens[:, 1 : LENGTH + 1]) @ [VOCABULARY**2, VOCABULARY, 1]
    return np.bincount(cells, minlength=VOCABULARY**LENGTH)


def _step(setting: Setting, schedule: Schedule | None, sampling, widths, tokens, lengths):
    """Drafts, verifies, commits: [count, LENGTH + 2] tokens, and how many of them there are."""
    B, T = len(lengths), setting.width
    rows = jnp.arange(B)
    anchors = tokens[rows, jnp.minimum(lengths, LENGTH)]
    chain, draft_logits = _drafted(setting, sampling, anchors, lengths, T)
    widths = schedule(chain) if schedule else widths
    flat = jnp.repeat(rows, T + 1)
    target_logits = TARGET[chain].reshape(B * (T + 1), VOCABULARY)
    p = speculation.distribution(target_logits, _rows(sampling, flat))
    drawn_as = draft_sampling(sampling, setting.method)
    q = speculation.distribution(
        draft_logits.reshape(B * T, -1), _rows(drawn_as, jnp.repeat(rows, T))
    )
    verdict = verify(
        p,
        rows * (T + 1),
        chain[:, 1:],
        q.reshape(B, T, -1),
        widths,
        speculation.Uniforms.of(sampling, lengths, T),
    )
    for k in range(T + 1):
        token = jnp.where(k < verdict.accepted, chain[:, min(k + 1, T)], verdict.token)
        place = jnp.minimum(lengths + 1 + k, LENGTH + 1)
        kept = jnp.where(k <= verdict.accepted, token, tokens[rows, place])
        tokens = tokens.at[rows, place].set(kept)
    return tokens, jnp.minimum(lengths + 1 + verdict.accepted, LENGTH)


def _drafted(setting: Setting, sampling, anchors, lengths, count: int):
    """The anchor and its drafts [B, 1 + T], and the logits [B, T, V] that they were drawn from."""
    state = draft_sampling(sampling, setting.method)
    state = replace(state, temperature=setting.drafted_at * state.temperature)
    chain, logits = [anchors], []
    for k in range(count):
        logits.append(DRAFT_LOGITS[k][chain[-1]])
        chain.append(sample(logits[-1], state, lengths, DRAFT + k))
    return jnp.stack(chain, 1), jnp.stack(logits, 1)


def _rows(state: SamplingState, rows) -> SamplingState:
    return jax.tree.map(lambda x: x[rows], state)


def law(setting: Setting) -> np.ndarray:
    """The probability of each sequence of three tokens, in float64: [512]."""
    rows = np.stack([processed(row, setting) for row in np.asarray(TARGET, np.float64)])
    first = rows[ANCHOR]
    return (first[:, None, None] * rows[:, :, None] * rows[None]).reshape(-1)


def processed(logits: np.ndarray, setting: Setting) -> np.ndarray:
    """softmax(logits / T), cut to the best `top_k`, then to the fewest whose mass reaches top_p."""
    scaled = logits / setting.temperature
    p = np.exp(scaled - scaled.max())
    best_first = np.argsort(-p, kind="stable")
    if setting.top_k:
        p[best_first[setting.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[best_first]) - p[best_first]
    p[best_first[before >= setting.top_p]] = 0
    return p / p.sum()
