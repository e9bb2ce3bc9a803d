"""sparse_attention: attention over each query's chosen blocks -> (out, lse); `dense_attention` is
the case "all blocks".

Prefill and decode are one meaning: B tiles of T queries, each tile one sequence with its own block
table (a decode step has T of 1 to 8, a prefill tile as many as the caller cuts). Partial results of
several ranks merge by their lse.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.layouts.pages import Source
from pallas_kernels.sparse_attention import decode, grouped, masked, prefill, reference, training

SPARSE = (
    Implementation("prefill", prefill.sparse_attention, prefill.refuse),
    Implementation("decode", decode.sparse_attention, decode.refuse),
    Implementation("training", training.sparse_attention, training.refuse),
    Implementation("grouped", grouped.sparse_attention, grouped.refuse),
    Implementation("masked", masked.sparse_attention, masked.refuse),
    Implementation("reference", reference.sparse_attention),
)
DENSE = (Implementation("masked", masked.dense_attention),)


def sparse_attention(
    q: Float[Array, "B T N H"],
    k: Source,
    v: Source,
    block_ids: Int[Array, "B T K C"],
    block_table: Int[Array, "B P"],
    positions: Int[Array, "B T"],
    *,
    scale: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Softmax attention of each query over the causal keys of its blocks (logical ids, -1 unused,
    any order, distinct).

    Head n reads key/value head n // (N / K). Returns the output in q's dtype and the float32
    log-sum-exp of scaled scores. A query without keys (padding: position -1, or only -1 ids) gives
    zeros and -inf. Source: spec/model 2.9.
    """
    args = (q, k, v, block_ids, block_table, positions)
    return choose(SPARSE, implementation, *args, scale=scale).run(*args, scale=scale)


def dense_attention(
    q: Float[Array, "B T N H"],
    k: Source,
    v: Source,
    block_table: Int[Array, "B P"],
    positions: Int[Array, "B T"],
    *,
    scale: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """`sparse_attention` with every block of the table chosen (M3's layers 0-2, spec/model 2.7)."""
    args = (q, k, v, block_table, positions)
    return choose(DENSE, implementation, *args, scale=scale).run(*args, scale=scale)
