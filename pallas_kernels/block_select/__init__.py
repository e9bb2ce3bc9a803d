"""block_select: index queries x index keys -> the blocks each query attends to (MSA's indexer,
spec/model 2.8).
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.block_select import mosaic, reference
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.layouts.pages import Source

TABLE = (
    Implementation("mosaic", mosaic.block_select, mosaic.refuse),
    Implementation("reference", reference.block_select),
)


def block_select(
    index_q: Float[Array, "B T K I"],
    index_k: Source,
    block_table: Int[Array, "B P"],
    positions: Int[Array, "B T"],
    *,
    top_k: int,
    init_blocks: int = 0,
    local_blocks: int = 1,
    implementation: str | None = None,
) -> Int[Array, "B T K C"]:
    """Logical ids of the min(C, causal) best blocks of each query and key/value head; -1 in unused
    places.

    A block's score is the maximum over its causal keys. The newest `local_blocks` and the first
    `init_blocks` are always in and count inside C. Equal scores: the lower id. NaN scores lose to
    every number. A query at position -1 is padding and gets -1 everywhere. `block_table` holds
    physical block ids by logical id. The order of ids carries no meaning.
    """
    args = (index_q, index_k, block_table, positions)
    options = {"top_k": top_k, "init_blocks": init_blocks, "local_blocks": local_blocks}
    return choose(TABLE, implementation, *args, **options).run(*args, **options)
