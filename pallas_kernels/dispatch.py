"""Which implementation of an op runs: the first of its table that does not refuse, or the one asked
for by name.

A refusal is a sentence. When every implementation refuses, the caller gets all the sentences at
once. On a GPU the reference does not run silently: where the faster ones refuse, it warns.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

HOPPER = "9.0"  # compute capability of the devices that the Mosaic kernels are written for


def accepts(*args: Any, **options: Any) -> None:
    """The `refuse` of an implementation that is right for every input."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op; `refuse` gets the op's arguments and returns a sentence, or None if
    it can run them.
    """

    name: str
    run: Callable[..., Any]
    refuse: Callable[..., str | None] = accepts


def choose(
    table: Sequence[Implementation], name: str | None, *args: Any, **options: Any
) -> Implementation:
    """The implementation for these arguments. Raises ValueError when the named one, or every one,
    refuses.
    """
    candidates = [one for one in table if name in (None, one.name)]
    if not candidates:
        known = ", ".join(one.name for one in table)
        raise ValueError(f"implementation {name!r} is not one of {known}")
    refusals = []
    for one in candidates:
        reason = one.refuse(*args, **options)
        if reason is None:
            if refusals and one.name == "reference" and name is None and _on_gpu():
                warnings.warn(f"the reference runs on a GPU: {'; '.join(refusals)}", stacklevel=3)
            return one
        refusals.append(f"{one.name}: {reason}")
    raise ValueError("no implementation takes these arguments: " + "; ".join(refusals))


def explain(table: Sequence[Implementation], *args: Any, **options: Any) -> str:
    """One line an implementation: what it says to these arguments, the one that would run first."""
    answers = [(one.name, one.refuse(*args, **options)) for one in table]
    return "\n".join(f"{name}: {reason or 'runs'}" for name, reason in answers)


def refuse_platform() -> str | None:
    """A sentence if JAX does not run on a GPU by default."""
    return None if _on_gpu() else f"needs a GPU, and JAX runs on {jax.default_backend()}"


def refuse_device() -> str | None:
    """A sentence if the kernels for Hopper cannot run where JAX runs by default."""
    if reason := refuse_platform():
        return reason
    capability = getattr(jax.devices()[0], "compute_capability", "unknown")
    if capability != HOPPER:
        return f"needs compute capability {HOPPER}, and the device has {capability}"
    return None


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"
