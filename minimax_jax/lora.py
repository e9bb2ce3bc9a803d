"""Adapters: y = base(x) + s (x A) B; a tree of `LowRank` that mirrors the model's own.

Their matrices are float32, for an optimizer's small steps, and are multiplied in the activations'
type: beside bfloat16 activations float32 products would run without tensor cores (160 of 1,045 ms
of a rollout on an H200). Both passes of a trainer and a rollout round alike.

An adapter is a plain argument of every step, beside the weights and never inside them: nested dicts
by attribute name (layers by their number as text), with `LowRank` leaves where a linear has one.
`None` anywhere means "none below here".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import grouped_matmul

Adapter = Mapping[str, Any] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LowRank:
    """One linear's adapter; for experts both matrices have a leading E, or 1 where all share one.
    `scale` is alpha / rank, kept out of the matrices.
    """

    a: Float[Array, "*#E R D"]
    b: Float[Array, "*#E F R"]
    scale: float = field(metadata={"static": True})


def part(adapter: Adapter, name: str) -> Any:
    """The adapter of a child, or None."""
    return None if adapter is None else adapter.get(name)


def low_rank(x: Float[Array, "*rows D"], adapter: LowRank) -> Float[Array, "*rows F"]:
    """s (x A^T) B^T in x's type."""
    inner = adapter.scale * _times(x, adapter.a)
    return _times(inner, adapter.b)


def grouped_low_rank(
    x: Float[Array, "M D"], adapter: LowRank, group_sizes: Int[Array, "E"]
) -> Float[Array, "M F"]:
    """`low_rank` with each row's own expert's matrices; rows sorted by expert."""
    inner = adapter.scale * _by_expert(x, adapter.a, group_sizes)
    return _by_expert(inner, adapter.b, group_sizes)


def _by_expert(
    x: Float[Array, "M D"], matrices: Float[Array, "e F D"], group_sizes: Int[Array, "E"]
) -> Float[Array, "M F"]:
    """Each row times its own expert's matrix, or the one that all share."""
    if len(matrices) == 1:
        return _times(x, matrices[0])
    return grouped_matmul(x, matrices.astype(x.dtype), group_sizes, out_dtype=x.dtype)


def _times(x: Float[Array, "*rows D"], matrix: Float[Array, "F D"]) -> Float[Array, "*rows F"]:
    return jnp.einsum("...D,FD->...F", x, matrix.astype(x.dtype), precision="highest")
