"""`mixture` for at most 8 tokens on Hopper, the shared expert with it: three launches, which find
out for themselves which experts are met.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import few_tokens, page_lanes
from pallas_kernels.grouped_matmul.activation import Activation
from pallas_kernels.grouped_matmul.by_parts import Matrices
from pallas_kernels.grouped_matmul.combined import combined
from pallas_kernels.grouped_matmul.few_groups import MOST_PAIRS
from pallas_kernels.grouped_matmul.few_plan import FewTokens
from pallas_kernels.grouped_matmul.grouping import EIGHT
from pallas_kernels.grouped_matmul.launch import MULTIPROCESSORS, Launch
from pallas_kernels.grouped_matmul.matching_rows import SLAB
from pallas_kernels.grouped_matmul.products import outer_bits
from pallas_kernels.layouts.mxfp8 import MXFP8Tensor
from pallas_kernels.layouts.nvfp4_pages import ROWS, NVFP4Pages
from pallas_kernels.scaled_matmul.plan import Plan
from pallas_kernels.scaled_matmul.weight_tiles import TILE

_WIDTHS, _SHARED_WIDTHS = 256, 512  # columns of which each product has a multiple
_MOST_COLUMNS = 6144  # of eight rows that leave room for pages; down has up to three times eight


def refuse(x: Array, matrices: Matrices, pairs: int, shared: Matrices | None) -> str | None:
    """A sentence for what these kernels do not do, of what `mosaic.mixture` does."""
    if len(x) > EIGHT or pairs > MOST_PAIRS:
        return f"{len(x)} tokens with {pairs} experts in all, more than {EIGHT} or {MOST_PAIRS}"
    widths = _WIDTHS if shared is None else _SHARED_WIDTHS
    for one, most in ((matrices.gate, _MOST_COLUMNS), (matrices.down, _MOST_COLUMNS // 2)):
        if one.shape[-1] % widths or one.shape[-1] > most:
            return f"{one.shape[-1]} columns, no multiple of {widths} up to {most}"
    if shared is None:
        return None
    if not all(isinstance(one, MXFP8Tensor) for one in shared):
        return "a matrix of the shared expert is not MXFP8"
    if x.dtype != jnp.bfloat16:
        return f"rows are {x.dtype}, which the shared expert's kernel does not take"
    if any(one.shape != two.shape[1:] for one, two in zip(shared, matrices, strict=True)):
        return "the shared expert is not as large as a routed one"
    if max(shared.gate.shape[0], shared.down.shape[0] // 2) > ROWS * MULTIPROCESSORS:
        return f"a shared expert of {shared.gate.shape}, more than a unit for each multiprocessor"
    return None


def mixture(
    x: Float[Array, "T D"],
    matrices: Matrices,
    experts: Int[Array, "T X"],
    weights: Float[Array, "T X"],
    activation: Activation,
    shared: Matrices | None,
) -> Float[Array, "T D"]:
    """See the package."""
    gate, up, down = matrices
    assert isinstance(gate, NVFP4Pages) and isinstance(up, NVFP4Pages)
    assert isinstance(down, NVFP4Pages)
    ids = experts.astype(jnp.int32).reshape(experts.size)
    first = _plan(experts, [gate, up], shared and [shared.gate, shared.up], activation, x.dtype)
    second = _plan(experts, [down], shared and [shared.down], activation, x.dtype)
    operands = _operands([gate, up], shared and [shared.gate, shared.up])
    hidden, place = few_tokens.kernel(first, x.dtype)(x, ids, *operands)
    operands = _operands([down, down], shared and [shared.down, shared.down])
    y = few_tokens.kernel(second, x.dtype)(hidden, ids, *operands)
    added = None if shared is None else second.shared_place
    return combined(y, place.reshape(experts.shape), weights, added)


def _operands(pages: Any, shared: Any) -> list[Array]:
    of_shared = [leaf for one in shared or [] for leaf in (one.codes, one.exponents)]
    return [*(one.pages for one in pages), *map(outer_bits, pages), *of_shared]


def _plan(
    experts: Array, weights: list[NVFP4Pages], shared: Any, activation: Activation, dtype
) -> FewTokens:
    """Of gate and up, or of down."""
    (E, features, columns), matrices = weights[0].shape, len(weights)
    (T, X), part = experts.shape, None
    places = EIGHT * (min(T * X, E) + 1)
    if shared:
        tiles = sum(one.shape[0] for one in shared) // TILE
        part = Plan(rows=T, tiles=tiles, columns=columns).width
    if matrices == 2:
        hidden = jax.ShapeDtypeStruct((features // SLAB, places, SLAB), dtype)
        out = hidden, jax.ShapeDtypeStruct((T * X,), jnp.int32)
        shape = hidden.shape, dtype, activation
        divide = weights[0].divides, weights[1].divides
        stores = [
            page_lanes.store_activations(*shape, divide=divide),
            page_lanes.store_activations(*shape, rounded=True),
        ]
    else:
        out = jax.ShapeDtypeStruct((places, features), dtype)
        shape = out.shape, dtype
        stores = [
            page_lanes.store_outputs(*shape, weights[0].divides),
            page_lanes.store_outputs(*shape),
        ]
    launch = Launch(
        widths=(EIGHT,),
        columns=columns,
        pages=features // ROWS,
        matrices=matrices,
        store=stores[0],
        out=out,
    )
    return FewTokens(
        launch=launch,
        tokens=T,
        choices=X,
        experts=E,
        by_group=matrices == 1,
        part=part,
        store_shared=stores[1],
    )
