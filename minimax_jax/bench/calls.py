"""A step that is called again and again, each time on what it handed on: as one program, and what
its calls take.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from pallas_kernels.device_timeline import Timeline, profiled

REPEATS = 5  # measurements of which the median counts
_PROFILED = 3  # runs that the timeline is made of


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What calls of a program took."""

    seconds: float  # a call, the median
    first_call: float  # seconds
    timeline: Timeline  # of a few
    fallbacks: tuple[str, ...]


def steady(step: Callable[..., Any], held: Any, *kept: Any) -> Callable[..., Any]:
    """`step(held, *kept, *arguments)`, which gives the next `held` and what it made, as a program
    of (held, *arguments) that gives `held` alone and leaves it where it lay: left to the compiler
    it may lie elsewhere, and the second call would be another program. It is called with the leaves
    of `kept`: to take a model of 30 layers apart at each call takes Python 3 ms.
    """
    leaves, tree = jax.tree.flatten(held)  # a dataclass with shapes cannot be made of shardings
    kept_leaves, kept_tree = jax.tree.flatten(kept)

    def run(leaves: list[Array], kept: list[Array], *arguments: Any) -> tuple[list[Array], Any]:
        held, made = step(
            jax.tree.unflatten(tree, leaves), *jax.tree.unflatten(kept_tree, kept), *arguments
        )
        return jax.tree.leaves(held), made

    lies = [leaf.sharding for leaf in leaves]
    program = jax.jit(run, donate_argnums=0, out_shardings=(lies, None))

    def call(held: Any, *arguments: Any) -> Any:
        done, _ = program(jax.tree.leaves(held), kept_leaves, *arguments)
        return jax.tree.unflatten(tree, done)

    return call


def timed(step: Callable[[Any], Any], held: Any, dispatches: int) -> Timed:
    """The time of a call of `step`, which gives the next `held`."""
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        held = jax.block_until_ready(step(held))
    first_call, times = time.perf_counter() - start, []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(dispatches):
            held = step(held)
        jax.block_until_ready(held)
        times.append((time.perf_counter() - start) / dispatches)
    kept = [held]

    def once() -> Any:
        kept[0] = step(kept[0])
        return kept[0]

    return Timed(
        seconds=float(np.median(times)),
        first_call=first_call,
        timeline=profiled(once, _PROFILED),
        fallbacks=fallbacks_of(caught),
    )


def num_calls(dispatches: int) -> int:
    """How often `timed` calls its step."""
    return 1 + REPEATS * dispatches + _PROFILED


def fallbacks_of(caught: list[warnings.WarningMessage]) -> tuple[str, ...]:
    """What was warned of while a program was traced, each once."""
    return tuple(dict.fromkeys(str(one.message) for one in caught))
