"""route on Hopper: logits by the matrix unit, then a warp a row for the choice. Two launches.

Up to `MAX_ROWS` rows the logits are parts that `gate` leaves; for more the three products of `gate`
are one of the library's, which reads x once.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import refuse_device
from pallas_kernels.route import reference
from pallas_kernels.route.choice import EXPERTS, choose_experts
from pallas_kernels.route.gate import MAX_ROWS, WIDTH, partial_logits, splits

_MOST_CHOSEN = 8


def refuse(
    x: Array, gate: Array, bias: Array, *, count: int, scale: float, one_device: bool
) -> str | None:
    """A sentence for what these kernels do not do."""
    if reason := refuse_device():
        return reason
    if not one_device:
        return "the compiler cannot partition a kernel over devices"
    if x.dtype != jnp.bfloat16 or gate.dtype != jnp.float32:
        return f"rows are {x.dtype} and the gate {gate.dtype}, not bfloat16 and float32"
    if gate.shape[0] != EXPERTS or gate.shape[1] % WIDTH:
        return f"a gate of {list(gate.shape)}, not {EXPERTS} x a multiple of {WIDTH}"
    if not x.size or count > _MOST_CHOSEN:
        return f"{count} experts for {x.size // gate.shape[1]} rows"
    return None


def route(
    x: Float[Array, "*rows D"],
    gate: Float[Array, "E D"],
    bias: Float[Array, "E"],
    *,
    count: int,
    scale: float,
    one_device: bool,
) -> tuple[Int[Array, "*rows X"], Float[Array, "*rows X"]]:
    """See the package."""
    rows = x.reshape(-1, x.shape[-1])
    found: Any = _route(count, scale, rows, gate, bias)
    experts, weights = (one.reshape(*x.shape[:-1], count) for one in found)
    return experts, weights


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _route(count: int, scale: float, x, gate, bias):
    logits = partial_logits(x, gate) if len(x) <= MAX_ROWS else _library_logits(x, gate)
    return choose_experts(logits, bias, count, scale)


def _forward(count, scale, x, gate, bias):
    found: Any = _route(count, scale, x, gate, bias)
    return found, (x, gate, found[0])


def _backward(count, scale, kept, gradients):
    x, gate, experts = kept

    def mixed(x, gate):
        return reference.mixing(reference.scores(x, gate), experts, scale)

    return *jax.vjp(mixed, x, gate)[1](gradients[1]), None


_route.defvjp(_forward, _backward)


def _library_logits(x: Float[Array, "T D"], gate: Float[Array, "E D"]) -> Float[Array, "1 T E"]:
    """One product with the three parts of the gate side by side, the smallest added first."""
    parts = jnp.concatenate(splits(gate))
    y = jnp.einsum("TD,ED->TE", x, parts, preferred_element_type=jnp.float32)
    small, middle, large = jnp.split(y, 3, axis=1)
    return ((small + middle) + large)[None]
