"""What sampling costs a step, beside a sampler that sorts the vocabulary.

Milliseconds a batch, the least of several rounds; 200,064 logits a row, as M3.1 has them, normal
with a standard deviation of 3.

    python -m minimax_jax.sampling.bench
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table

from minimax_jax.sampling.draws import uniform
from minimax_jax.sampling.history import History
from minimax_jax.sampling.law import processed, sample
from minimax_jax.sampling.logprobs import token_logprobs
from minimax_jax.sampling.params import SamplingParams
from minimax_jax.sampling.state import SamplingState

V = 200_064
BATCHES = (1, 8, 32)
ROUNDS = 5
CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(),
    "top-p 0.95": SamplingParams(top_p=0.95),
    "top-k 40": SamplingParams(top_k=40),
    "top-k 40, top-p 0.95": SamplingParams(top_k=40, top_p=0.95),
    "penalties": SamplingParams(repetition_penalty=1.1, presence_penalty=0.5),
    "logit bias, bad words": SamplingParams(logit_bias={5: 2.0}, bad_words=((1, 2, 3),)),
}


def main() -> None:
    """Prints a table."""
    console, device = Console(), jax.devices()[0]
    table = Table(
        title=f"ms a batch; {device.platform} {device.device_kind}, JAX {jax.__version__}"
    )
    for column in ("sampling", *(f"B={B}" for B in BATCHES)):
        table.add_column(column, justify="left" if column == "sampling" else "right")
    for name, params in CASES.items():
        table.add_row(name, *(f"{milliseconds(_step, prepared(params, B)):.2f}" for B in BATCHES))
    cut = CASES["top-k 40, top-p 0.95"]
    times = (milliseconds(_sorting_step, prepared(cut, B)) for B in BATCHES)
    table.add_row("the same by sorting", *(f"{ms:.2f}" for ms in times))
    times = (milliseconds(_logprobs, prepared(cut, B)) for B in BATCHES)
    table.add_row("20 top log-probabilities", *(f"{ms:.2f}" for ms in times))
    console.print(table)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A batch: logits, settings, positions, history."""

    logits: jax.Array
    state: SamplingState
    positions: jax.Array
    history: History


def prepared(params: SamplingParams, B: int) -> Prepared:
    """B sequences after a prompt of 1,000 tokens and 100 of their own."""
    rng = np.random.default_rng(B)
    prompts, outputs = (rng.integers(0, V, (B, n)).tolist() for n in (1000, 100))
    state = SamplingState.of([replace(params, seed=i) for i in range(B)], [1000] * B, V)
    return Prepared(
        logits=jnp.asarray(rng.normal(size=(B, V)) * 3, jnp.float32),
        state=state,
        positions=jnp.full(B, 1100),
        history=History.of(state, prompts, outputs, V),
    )


@jax.jit
def _step(given: Prepared) -> jax.Array:
    logits = processed(given.logits, given.state, given.positions, given.history)
    return sample(logits, given.state, given.positions)


@jax.jit
def _sorting_step(given: Prepared) -> jax.Array:
    """The same law by sorting every row, as samplers commonly have it."""
    ordered, ids = lax.top_k(given.logits - jnp.max(given.logits, axis=-1, keepdims=True), V)
    ranks, state = jnp.arange(V), given.state
    ordered = jnp.where(ranks < state.top_k[:, None], ordered, -jnp.inf)
    mass = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
    target = uniform(state, given.positions) * state.top_p
    place = jnp.sum(mass <= target[:, None], axis=-1)
    return jnp.take_along_axis(ids, place[:, None], axis=-1)


@jax.jit
def _logprobs(given: Prepared) -> jax.Array:
    found = token_logprobs(given.logits, given.positions, 20)
    return jnp.asarray(found.top)


def milliseconds(step: Callable[[Prepared], jax.Array], given: Prepared) -> float:
    """The least of several rounds, compiled before."""
    jax.block_until_ready(step(given))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(step(given))
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


if __name__ == "__main__":
    main()
