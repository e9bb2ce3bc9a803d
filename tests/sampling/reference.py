"""The law of sampling again: float64, one row, loops, in stages whose order can be changed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from minimax_jax.sampling import (
    History,
    SamplingParams,
    SamplingState,
    masked,
    packed_mask,
    probabilities,
    processed,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: its raw logits, its tokens so far and its grammar's mask."""

    logits: np.ndarray
    params: SamplingParams
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    grammar: tuple[bool, ...] | None = None


def grammar(x: np.ndarray, case: Case) -> np.ndarray:
    return x if case.grammar is None else np.where(case.grammar, x, -np.inf)


def forbidden(x: np.ndarray, case: Case) -> np.ndarray:
    x, params = x.copy(), case.params
    if params.allowed_token_ids is not None:
        for token in set(range(len(x))) - set(params.allowed_token_ids):
            x[token] = -np.inf
    for *begun, last in params.bad_words:
        if list(case.output[len(case.output) - len(begun) :]) == begun:
            x[last] = -np.inf
    if len(case.output) < params.min_tokens:
        x[list(params.stop_token_ids)] = -np.inf
    return x


def bias(x: np.ndarray, case: Case) -> np.ndarray:
    x = x.copy()
    for token, value in case.params.logit_bias.items():
        x[token] += value
    return x


def repetition(x: np.ndarray, case: Case) -> np.ndarray:
    x, penalty = x.copy(), case.params.repetition_penalty
    for token in {*case.prompt, *case.output}:
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    return x


def frequency_and_presence(x: np.ndarray, case: Case) -> np.ndarray:
    x = x.copy()
    for token in case.output:
        x[token] -= case.params.frequency_penalty
    for token in set(case.output):
        x[token] -= case.params.presence_penalty
    return x


def temperature(x: np.ndarray, case: Case) -> np.ndarray:
    return x / (case.params.temperature or 1.0)


def min_p(x: np.ndarray, case: Case) -> np.ndarray:
    p = softmax(x)
    return np.where(p < case.params.min_p * p.max(), -np.inf, x)


def top_k(x: np.ndarray, case: Case) -> np.ndarray:
    kept = best_first(x)[: case.params.top_k if case.params.top_k > 0 else None]
    return np.where(np.isin(np.arange(len(x)), kept), x, -np.inf)


def top_p(x: np.ndarray, case: Case) -> np.ndarray:
    kept, mass, p = [], 0.0, softmax(x)
    for token in best_first(x):
        kept.append(token)
        mass += p[token]
        if mass >= case.params.top_p and case.params.top_p < 1:
            break
    return np.where(np.isin(np.arange(len(x)), kept), x, -np.inf)


Stage = Callable[[np.ndarray, Case], np.ndarray]
ORDER: tuple[Stage, ...] = (
    grammar,
    forbidden,
    bias,
    repetition,
    frequency_and_presence,
    temperature,
    min_p,
    top_k,
    top_p,
)


def softmax(x: np.ndarray) -> np.ndarray:
    if np.isneginf(x).all():  # in a wrong order
        return np.zeros(len(x))
    p = np.exp(x - x.max())
    return p / p.sum()


def best_first(x: np.ndarray) -> np.ndarray:
    return np.argsort(-x, kind="stable")


def law(case: Case, order: Sequence[Stage] = ORDER) -> np.ndarray:
    """The distribution of the next token [V]; all on the argmax at temperature 0."""
    x = np.asarray(case.logits, np.float64)
    for stage in order:
        if case.params.temperature == 0 and stage is temperature:
            return np.eye(len(x))[np.argmax(x)]
        x = stage(x, case)
    return softmax(x)


def batch(cases: Sequence[Case]) -> tuple[jax.Array, SamplingState, jax.Array, History]:
    """The cases as one batch: masked logits, settings, positions, history."""
    V = len(cases[0].logits)
    state = SamplingState.of([c.params for c in cases], [len(c.prompt) for c in cases], V)
    history = History.of(state, [c.prompt for c in cases], [c.output for c in cases], V)
    positions = jnp.array([len(c.prompt) + len(c.output) for c in cases])
    logits = jnp.asarray(np.stack([c.logits for c in cases]), jnp.float32)
    allowed = [np.ones(V, bool) if c.grammar is None else np.array(c.grammar) for c in cases]
    return masked(logits, jnp.asarray(packed_mask(np.stack(allowed)))), state, positions, history


@jax.jit
def _probabilities(logits, state, positions, history):
    return probabilities(processed(logits, state, positions, history), state)


def found(cases: Sequence[Case]) -> np.ndarray:
    """What the project says of the cases, [cases, V]; temperature 0 as temperature 1."""
    return np.asarray(_probabilities(*batch(cases)))
