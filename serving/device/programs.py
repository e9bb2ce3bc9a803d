"""Compiled programs by name, made before they are needed.

A program that is called with other shapes than it was made for raises; it never compiles behind
one's back. It takes the leaves of its arguments, which is the fastest way to dispatch.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

MAX_AT_ONCE = 8  # programs that are compiled at the same time: each takes memory for it
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A step, a pure function, with what it is called with; calls of one name differ in the values
    of `args` alone. Argument `donated` is given to the step, which writes its result there.
    """

    name: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    static: Mapping[str, Any] = field(default_factory=dict)
    donated: int = 0


class Programs:
    """Keeps what is compiled. `context` is where steps are traced, such as a mesh."""

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]):
        self._context = context
        self._compiled: dict[str, jax.stages.Compiled] = {}
        self.are_complete = False  # from then on a missing one is worth a warning

    def prepare(self, call: Call) -> jax.stages.Compiled:
        """The program of a call, which is not made."""
        program = self._compiled.get(call.name)
        if program is None:
            if self.are_complete:
                _log.warning("%s is compiled while requests wait for it", call.name)
            program = self._compiled[call.name] = self._traced(call).compile()
        return program

    def complete(self, calls: Sequence[Call], done: Callable[[str], None]) -> None:
        """Makes those that are not there yet, several at once; `done` hears each one's name."""
        missing = [call for call in calls if call.name not in self._compiled]
        with ThreadPoolExecutor(min(MAX_AT_ONCE, os.cpu_count() or 1)) as pool:
            making = {pool.submit(self._traced(call).compile): call.name for call in missing}
            for future in as_completed(making):
                self._compiled[making[future]] = future.result()
                done(making[future])
        self.are_complete = True

    def _traced(self, call: Call) -> jax.stages.Lowered:
        leaves, trees = zip(*map(jax.tree.flatten, call.args), strict=True)
        step = partial(_run_on_leaves, partial(call.step, **call.static), trees)
        with self._context():
            return jax.jit(step, donate_argnums=call.donated).lower(*leaves)

    def run(self, call: Call) -> Any:
        """What the step gives; it is compiled first if it was not prepared."""
        return self.prepare(call)(*map(jax.tree.leaves, call.args))

    def by_name(self) -> Mapping[str, jax.stages.Compiled]:
        """What is compiled."""
        return self._compiled


def _run_on_leaves(step: Callable[..., Any], trees: Sequence[Any], *leaves: list[Any]) -> Any:
    return step(*map(jax.tree.unflatten, trees, leaves))
