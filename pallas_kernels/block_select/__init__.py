"""block_select: index queries x index keys -> the blocks each query attends to (MSA's indexer,
spec/model 2.8).

Its two halves, `block_scores` and `best_blocks`, are ops as well, for those who score a context in
several places. Scores of one implementation may be given to the other's choice.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.block_select import mosaic, reference
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.layouts.pages import Source

TABLE = (
    Implementation("mosaic", mosaic.block_select, mosaic.refuse),
    Implementation("reference", reference.block_select),
)
SCORES = (
    Implementation("mosaic", mosaic.block_scores, mosaic.refuse_scores),
    Implementation("reference", reference.block_scores),
)
CHOICE = (
    Implementation("mosaic", mosaic.best_blocks, mosaic.refuse_choice),
    Implementation("reference", reference.best_blocks),
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


def block_scores(
    index_q: Float[Array, "B T K I"],
    index_k: Source,
    block_table: Int[Array, "B P"],
    positions: Int[Array, "B T"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B T K P4"]:
    """What `best_blocks` compares: a score for each block before the newest that a query sees, in a
    unit of the query's own. Those of other blocks, and those past P, mean nothing.
    """
    args = (index_q, index_k, block_table, positions)
    return choose(SCORES, implementation, *args).run(*args)


def best_blocks(
    scores: Float[Array, "B T K P"],
    positions: Int[Array, "B T"],
    *,
    block_size: int,
    top_k: int,
    init_blocks: int = 0,
    local_blocks: int = 1,
    implementation: str | None = None,
) -> Int[Array, "B T K C"]:
    """`block_select`, once there are scores."""
    options = {"block_size": block_size, "top_k": top_k}
    options |= {"init_blocks": init_blocks, "local_blocks": local_blocks}
    return choose(CHOICE, implementation, scores, positions, **options).run(
        scores, positions, **options
    )
