"""The ops of this package by the kernels of `products`: routed experts as a whole, and one matrix
an expert.

Tokens are taken some thousands at a time, so that byte offsets fit in 32 bits. The experts are
frozen, so only rows and mixing weights have gradients: those of the mixture by its products one by
one, a product's by `transposed`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import refuse_device
from pallas_kernels.grouped_matmul import (
    by_parts,
    few_mixture,
    grouping,
    products,
    reference,
    transposed,
)
from pallas_kernels.grouped_matmul.activation import Activation
from pallas_kernels.grouped_matmul.by_parts import Matrices
from pallas_kernels.grouped_matmul.combined import combined
from pallas_kernels.grouped_matmul.grouping import Grouping
from pallas_kernels.grouped_matmul.matching_rows import WIDTHS, matching_rows
from pallas_kernels.layouts.nvfp4_pages import NVFP4Pages
from pallas_kernels.scaled_matmul import Weight

_HALVES = (jnp.bfloat16, jnp.float16)
_LARGEST_OUTPUT = 2**30  # bytes of the sorted rows' outputs


def refuse_mixture(x, matrices, experts, weights, activation, shared) -> str | None:
    """A sentence for what these kernels do not do."""
    return _refuse(x, experts.size, matrices)


def refuse_few_tokens(x, matrices, experts, weights, activation, shared) -> str | None:
    """A sentence for what these kernels do not do."""
    reason = _refuse(x, experts.size, matrices)
    return reason or few_mixture.refuse(x, matrices, experts.size, shared)


def refuse_matmul(x, weights, group_sizes, *, out_dtype) -> str | None:
    """A sentence for what these kernels do not do."""
    if out_dtype not in (jnp.float32, *_HALVES):
        return f"results are {jnp.dtype(out_dtype)}, neither float32 nor of 16 bits"
    return _refuse(x, len(x), [weights])


def _refuse(x, num_rows: int, matrices) -> str | None:
    if reason := refuse_device():
        return reason
    if not all(isinstance(one, NVFP4Pages) for one in matrices):
        return "weights are not NVFP4 pages"
    if x.dtype not in _HALVES:
        return f"rows are {x.dtype}, neither bfloat16 nor float16"
    if x.shape[-1] % WIDTHS:
        return f"{x.shape[-1]} columns, not a multiple of {WIDTHS}"
    return None if num_rows else "there are no rows"


def mixture(
    x: Float[Array, "T D"],
    matrices: Matrices,
    experts: Int[Array, "T X"],
    weights: Float[Array, "T X"],
    activation: Activation,
    shared: Matrices | None,
) -> Float[Array, "T D"]:
    """See the package."""
    X, D = experts.shape[1], x.shape[1]
    together = max(1, _LARGEST_OUTPUT // (X * D * x.dtype.itemsize))
    parts: list[Any] = [
        _frozen(
            _grouped,
            activation,
            x[i : i + together],
            matrices,
            None,
            experts[i : i + together],
            weights[i : i + together],
        )
        for i in range(0, len(x), together)
    ]
    y = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return y if shared is None else y + by_parts.of_shared(x, shared, activation)


def few_tokens(
    x: Float[Array, "T D"],
    matrices: Matrices,
    experts: Int[Array, "T X"],
    weights: Float[Array, "T X"],
    activation: Activation,
    shared: Matrices | None,
) -> Float[Array, "T D"]:
    """See the package."""
    y: Any = _frozen(few_mixture.mixture, activation, x, matrices, shared, experts, weights)
    return y


def _grouped(x, matrices, experts, weights, activation, _) -> Float[Array, "T D"]:
    E = matrices.gate.shape[0]
    return mixture_of(x, matrices, grouping.make(experts, E), weights, activation)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _frozen(run, activation, x, matrices, shared, experts, weights):
    return run(x, matrices, experts, weights, activation, shared)


def _forward(run, activation, *operands):
    return _frozen(run, activation, *operands), operands


def _backward(_, activation, operands, gradient):
    x, matrices, shared, experts, weights = operands

    def linear(name, rows, sizes):
        return grouped_matmul(rows, getattr(matrices, name), sizes, out_dtype=rows.dtype)

    def meaning(x, weights):
        E = matrices.gate.shape[0]
        y = by_parts.mixture_by(linear, x, E, experts, weights, activation)
        return y if shared is None else y + by_parts.of_shared(x, shared, activation)

    of_x, of_weights = jax.vjp(meaning, x, weights)[1](gradient)
    return of_x, None, None, None, of_weights


_frozen.defvjp(_forward, _backward)


def mixture_of(
    x: Float[Array, "T D"],
    matrices: Matrices,
    groups: Grouping,
    weights: Float[Array, "T X"],
    activation: Activation,
) -> Float[Array, "T D"]:
    """The mixture with the grouping at hand."""
    gate, up, down = matrices
    assert isinstance(gate, NVFP4Pages) and isinstance(up, NVFP4Pages)
    assert isinstance(down, NVFP4Pages)
    hidden = products.activations(x, gate, up, groups, activation)
    y = products.outputs(hidden, down, groups)
    return combined(y, groups.place.reshape(weights.shape), weights)


def grouped_matmul(
    x: Float[Array, "M D"],
    weights: Weight,
    group_sizes: Int[Array, "E"],
    *,
    out_dtype: DTypeLike,
) -> Float[Array, "M F"]:
    """See the package."""
    out_dtype = jnp.dtype(out_dtype)
    _, F, D = weights.shape
    together = max(1, _LARGEST_OUTPUT // max(F * out_dtype.itemsize, D * x.dtype.itemsize))
    ends = jnp.cumsum(group_sizes)
    parts = []
    for i in range(0, len(x), together):
        rows = x[i : i + together]
        inside = jnp.clip(ends - i, 0, len(rows))
        parts.append(_matmul(out_dtype, rows, weights, jnp.diff(inside, prepend=0)))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(out_dtype, x, weights, group_sizes):
    groups = _sorted_groups(len(x), group_sizes)
    y = products.outputs(matching_rows(x, groups.token), weights, groups, out_dtype)
    return y[jnp.minimum(groups.place, len(y) - 1)]


def _sorted_groups(num_rows: int, sizes: Int[Array, "E"], widths=None) -> Grouping:
    ends = jnp.cumsum(sizes)
    expert = jnp.sum(ends[None] <= jnp.arange(num_rows)[:, None], axis=1)
    return grouping.make(expert[:, None], len(sizes), widths)


def _forward_matmul(out_dtype, x, weights, group_sizes):
    return _matmul(out_dtype, x, weights, group_sizes), (x, weights, group_sizes)


def _backward_matmul(out_dtype, kept, gradient):
    x, weights, group_sizes = kept
    run = _gradient_of_rows if x.dtype == jnp.bfloat16 else reference.gradient_of_rows
    return run(gradient, weights, group_sizes, x.dtype), None, None


def _gradient_of_rows(gradient, weights, group_sizes, dtype) -> Float[Array, "M D"]:
    """As the reference's: each row, rounded, times its own matrix; 0 beyond the last group."""
    groups = _sorted_groups(len(gradient), group_sizes, (transposed.GROUP_ROWS,))
    rows = gradient.astype(dtype)[jnp.maximum(groups.token, 0)]
    y = transposed.product(rows, weights, groups)
    there = groups.place < len(y)
    return jnp.where(there[:, None], y[jnp.minimum(groups.place, len(y) - 1)], 0)


_matmul.defvjp(_forward_matmul, _backward_matmul)
