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
from typing import Any, Literal

import jax

MAX_AT_ONCE = 8  # programs that are compiled at the same time: each takes memory for it
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A step, a pure function, with what the host gives it; calls of one name differ in the values
    of `host`, and in the adapter, alone. `kind` says what it takes of what is kept (`kept.Kept`).
    """

    name: str
    kind: Literal["slots", "masks", "rows"]
    step: Callable[..., Any]
    host: tuple[Any, ...]
    static: Mapping[str, Any] = field(default_factory=dict)
    adapter: str | None = None


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """All that a step is called with; it writes its result where argument `donated` is."""

    values: tuple[Any, ...]
    donated: int


class Programs:
    """Keeps what is compiled. `context` is where steps are traced, such as a mesh."""

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]):
        self._context = context
        self._compiled: dict[str, jax.stages.Compiled] = {}
        self.are_complete = False  # from then on a missing one is worth a warning

    def prepare(self, call: Call, arguments: Arguments) -> jax.stages.Compiled:
        """The program of a call, which is not made."""
        program = self._compiled.get(call.name)
        if program is None:
            if self.are_complete:
                _log.warning("%s is compiled while requests wait for it", call.name)
            program = self._compiled[call.name] = self.traced(call, arguments).compile()
        return program

    def complete(
        self, calls: Sequence[tuple[Call, Arguments]], done: Callable[[str], None]
    ) -> None:
        """Makes those that are not there yet, several at once; `done` hears each one's name."""
        missing = [one for one in calls if one[0].name not in self._compiled]
        with ThreadPoolExecutor(min(MAX_AT_ONCE, os.cpu_count() or 1)) as pool:
            making = {pool.submit(self.traced(*one).compile): one[0].name for one in missing}
            for future in as_completed(making):
                self._compiled[making[future]] = future.result()
                done(making[future])
        self.are_complete = True

    def traced(self, call: Call, arguments: Arguments) -> jax.stages.Lowered:
        """The program of a call before it is compiled."""
        leaves, trees = zip(*map(jax.tree.flatten, arguments.values), strict=True)
        step = partial(_run_on_leaves, partial(call.step, **call.static), trees)
        with self._context():
            return jax.jit(step, donate_argnums=arguments.donated).lower(*leaves)

    def run(self, call: Call, arguments: Arguments) -> Any:
        """What the step gives; it is compiled first if it was not prepared."""
        return self.prepare(call, arguments)(*map(jax.tree.leaves, arguments.values))

    def by_name(self) -> Mapping[str, jax.stages.Compiled]:
        """What is compiled."""
        return self._compiled


def _run_on_leaves(step: Callable[..., Any], trees: Sequence[Any], *leaves: list[Any]) -> Any:
    return step(*map(jax.tree.unflatten, trees, leaves))
