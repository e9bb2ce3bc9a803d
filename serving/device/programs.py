"""Compiled programs by name, made before they are needed.

A program that is called with other shapes than it was made for raises; it never compiles behind
one's back.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import jax

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A jitted step with what it is called with; calls of one name differ in their values alone."""

    name: str
    step: Any
    args: tuple[Any, ...]
    static: Mapping[str, Any] = field(default_factory=dict)


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
            with self._context():
                program = call.step.lower(*call.args, **call.static).compile()
            self._compiled[call.name] = program
        return program

    def run(self, call: Call) -> Any:
        """What the step gives; it is compiled first if it was not prepared."""
        return self.prepare(call)(*call.args)

    def by_name(self) -> Mapping[str, jax.stages.Compiled]:
        """What is compiled."""
        return self._compiled
