"""kv_insert: norm, rotate, quantise and write new keys and values into pages, in place.

`norm_rope` is the first half on its own, as the packed path without a cache needs it;
`with_queries` has queries go the same way as their keys.
"""

from collections.abc import Sequence

from jaxtyping import Array, UInt8

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.kv_insert import mosaic, reference
from pallas_kernels.kv_insert.reference import (
    KeyTransform,
    Query,
    Rows,
    Slots,
    gemma_norm,
    norm_rope,
)
from pallas_kernels.layouts.pool import PoolLayout

__all__ = [
    "KeyTransform",
    "Query",
    "Rows",
    "Slots",
    "gemma_norm",
    "kv_insert",
    "norm_rope",
    "with_queries",
]

TABLE = (
    Implementation("mosaic", mosaic.kv_insert, mosaic.refuse),
    Implementation("reference", reference.kv_insert),
)


def kv_insert(
    pool: UInt8[Array, "P lines 128"],
    layout: PoolLayout,
    line: Array | int,
    rows: Rows,
    slots: Slots,
    transform: KeyTransform,
    *,
    implementation: str | None = None,
) -> UInt8[Array, "P lines 128"]:
    """The pool with `rows` of one layer written at `slots`; `line` is the layer's first line in a
    block's row.

    Padding tokens have block id -1 and are dropped.
    """
    args = (pool, layout, line, rows, slots, transform)
    return choose(TABLE, implementation, *args).run(*args)[0]


def with_queries(
    pool: UInt8[Array, "P lines 128"],
    layout: PoolLayout,
    line: Array | int,
    rows: Rows,
    slots: Slots,
    transform: KeyTransform,
    queries: Sequence[Query],
    *,
    implementation: str | None = None,
) -> tuple[UInt8[Array, "P lines 128"], list[Array]]:
    """`kv_insert`, and `norm_rope` of the same tokens' queries, in one launch."""
    args = (pool, layout, line, rows, slots, transform, queries)
    return choose(TABLE, implementation, *args).run(*args)
