"""The ways of a sequence through the model, and a walk along one of them that writes down what
every layer did.

A walk runs the layers as `Model.hidden` does, each under jit, with the attention ops and the router
recorded. A record is a dict of numpy arrays; T tokens, S = T keys, both in the sequence's order:

    x, out [T, D]         the layer's input and output
    k, v [K, S, H]        what attention read          q [T, N, H]
    index_k [1, S, I]     what the indexer read        index_q [T, K, I]
    ids [T, K, C]         the blocks it chose          attended [T, N, H], before o_proj
    routed [T, D]         what the router was given    experts [T, X], what it chose
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from minimax_jax import attention, context_blocks
from minimax_jax.batch import Batch, pack
from minimax_jax.cache import pool_layout
from minimax_jax.context import Context
from minimax_jax.model import Model
from minimax_jax.moe import Router
from pallas_kernels.layouts.pages import read
from pallas_kernels.layouts.pool import CacheFormats, PoolLayout

NUM_BLOCKS = 24
CHUNK_WIDTHS = (1, 112, 320)  # shapes that are compiled; a chunk is padded up to one

Seen = dict[str, np.ndarray]
Ops = dict[str, Callable]  # what attention calls, by name
Fault = Callable[[], Ops]  # the ops to call instead; planted to see a proof fail
KEYS = ("k", "v", "index_k")
_AXES = {"q": 2, "attended": 2, "index_q": 2, "ids": 2}  # of one token's entry, else 1
# Who calls them, so that a recorder can stand in their place.
_CALLERS = {
    "block_select": context_blocks,
    "sparse_attention": attention,
    "dense_attention": attention,
}


@dataclass(frozen=True, kw_only=True)
class Walk:
    """What every layer did with a sequence, and the logits [T, V]."""

    layers: list[Seen]
    logits: np.ndarray


def packed_batch(ids: Sequence[int], block_size: int) -> Batch:
    """The sequence as tiles of one block, padded to one shape for all lengths up to `NUM_BLOCKS`
    blocks.
    """
    alone, blocks = np.zeros(len(ids), int), max(NUM_BLOCKS, -(-len(ids) // block_size))
    sizes = {"num_tiles": blocks, "table_width": blocks}
    return pack(np.array(ids), alone, block_size, **sizes)[0]


def chunk_batches(
    ids: Sequence[int], chunks: Sequence[int], widths: Sequence[int] = CHUNK_WIDTHS
) -> Iterator[Batch]:
    """The sequence over scattered pages, chunk by chunk, each padded to one of the widths."""
    assert sum(chunks) == len(ids)
    table = np.random.default_rng(3).permutation(NUM_BLOCKS)
    start = 0
    for count in chunks:
        width = next(width for width in widths if width >= count)
        positions = np.arange(start, start + width)
        positions = np.where(positions < start + count, positions, -1)
        yield Batch(
            tokens=jnp.asarray(np.resize(ids[start : start + count], (1, width)), jnp.int32),
            positions=jnp.asarray(positions[None], jnp.int32),
            block_table=jnp.asarray(table[None], jnp.int32),
        )
        start += count


def walk_packed(
    model: Model, ids: Sequence[int], layout: PoolLayout, fault: Fault | None = None
) -> Walk:
    """The way without a cache."""
    return _walk(model, [packed_batch(ids, layout.block_size)], layout, None, fault)


def walk_pages(
    model: Model,
    ids: Sequence[int],
    layout: PoolLayout,
    chunks: Sequence[int],
    fault: Fault | None = None,
) -> Walk:
    """The way through pages: one chunk is a whole prefill, chunks of one token are decode steps."""
    batches = list(chunk_batches(ids, chunks, (1, CHUNK_WIDTHS[-1])))
    return _walk(model, batches, layout, layout.empty(NUM_BLOCKS)[None], fault)


def unrounded(model: Model, layer: int, seen: Seen) -> Seen:
    """What a layer packed, without rounding, does with the inputs of a record: its queries and
    keys, and its output when attention gives what the record says.
    """
    layout = pool_layout(model.config, CacheFormats(kv="f32", index="f32"))
    batch = packed_batch([0] * len(seen["x"]), layout.block_size)
    x, attended = (_tiles(seen[name], batch) for name in ("x", "attended"))
    context = Context.of(batch, model.config, layout)
    _, _, exact = _run(model.layers[layer], x, None, 0, context, None, attended)
    return _rows(exact, batch)


def _walk(model: Model, batches: list[Batch], layout: PoolLayout, pool, fault) -> Walk:
    parts: list[list[Seen]] = [[] for _ in model.layers]
    logits = []
    for batch in batches:
        context = Context.of(batch, model.config, layout)
        x = model.embedded(batch.tokens)
        for i, layer in enumerate(model.layers):
            line = jnp.int32(layout.layer_line(i))
            x, pool, seen = _run(layer, x, pool, line, context, fault)
            parts[i].append(_rows(seen, batch))
        logits.append(_rows({"logits": _logits(model, x)}, batch)["logits"])
    return Walk(layers=[_joined(part) for part in parts], logits=np.concatenate(logits))


@jax.jit
def _logits(model: Model, x):
    return model.logits(x)


@partial(jax.jit, static_argnames=("fault",))
def _run(layer, x, pool, line, context: Context, fault: Fault | None, attended=None):
    """The layer's output, the pool, and what the layer did; `attended` replaces attention."""
    seen = {"x": x}
    lse = None if attended is None else jnp.zeros(attended.shape[:-1])  # which nothing reads here
    ops = {name: getattr(caller, name) for name, caller in _CALLERS.items()}
    ops |= fault() if fault else {}
    ops["block_select"] = _recorded_select(ops["block_select"], seen)
    for name in ("sparse_attention", "dense_attention"):
        op = ops[name] if attended is None else lambda *operands, **options: (attended, lse)
        ops[name] = _recorded_attention(op, seen)
    route = _recorded_router(Router.__call__, seen)
    with ExitStack() as stack:
        for name, op in ops.items():
            stack.enter_context(mock.patch.object(_CALLERS.get(name, attention), name, op))
        stack.enter_context(mock.patch.object(Router, "__call__", route))
        out, pool = layer(x, pool, line, context)
    return out, pool, seen | {"out": out}


def _recorded_select(op: Callable, seen: dict) -> Callable:
    def select(index_q, index_k, table, positions, **options):
        ids = op(index_q, index_k, table, positions, **options)
        seen.update(index_q=index_q, index_k=_key_rows(index_k, table), ids=ids)
        return ids

    return select


def _recorded_attention(op: Callable, seen: dict) -> Callable:
    def attend(q, k, v, *where, scale):
        out, lse = op(q, k, v, *where, scale=scale)
        table = where[-2]
        seen.update(q=q, k=_key_rows(k, table), v=_key_rows(v, table), attended=out)
        return out, lse

    return attend


def _recorded_router(op: Callable, seen: dict) -> Callable:
    def route(router, x):
        experts, weights = op(router, x)
        seen.update(routed=x, experts=experts)
        return experts, weights

    return route


def _key_rows(source, table):
    """All rows [heads, S, width] of the one sequence, whose table every tile has."""
    rows = read(source, jnp.broadcast_to(table[0], (source.num_heads, table.shape[1])))
    return rows.reshape(source.num_heads, -1, rows.shape[-1])


def _tiles(rows: np.ndarray, batch: Batch) -> jax.Array:
    """Rows [T, ...] as a packed batch holds them, zeros where it is padded."""
    tiles = np.zeros((batch.tokens.size, *rows.shape[1:]), rows.dtype)
    tiles[: len(rows)] = rows
    return jnp.asarray(tiles.reshape(*batch.tokens.shape, *rows.shape[1:]))


def _rows(arrays: Mapping[str, jax.Array], batch: Batch) -> Seen:
    """Without padding: tokens flattened to [T, ...], keys up to the last token's."""
    positions = np.asarray(batch.positions).reshape(-1)
    rows = {}
    for name, array in arrays.items():
        if name in KEYS:
            rows[name] = np.asarray(array)[:, : positions.max() + 1]
        else:
            entry = array.shape[array.ndim - _AXES.get(name, 1) :]
            rows[name] = np.asarray(array).reshape(len(positions), *entry)[positions >= 0]
    return rows


def _joined(parts: list[Seen]) -> Seen:
    """One record of all chunks; a key that was stored is read the same ever after."""
    joined = {}
    for name, last in parts[-1].items():
        if name in KEYS:
            for part in parts:
                np.testing.assert_array_equal(part[name], last[:, : part[name].shape[1]])
        joined[name] = last if name in KEYS else np.concatenate([part[name] for part in parts])
    return joined
