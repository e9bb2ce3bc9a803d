"""block_select on Hopper: scores of NVFP4 index pages (`score`), then the best blocks (`top_k`).

Scores of a million tokens are 32 KB a row, so a long prefill is cut: at most `MAX_SCORE_BYTES` of
them exist at once.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.block_select import schedule, score
from pallas_kernels.block_select.schedule import STEP
from pallas_kernels.block_select.top_k import MAX_TOP_K, top_blocks
from pallas_kernels.dispatch import refuse_device
from pallas_kernels.layouts.pages import Pages, Source

MAX_SCORE_BYTES = 2**28
_HEADS = (1, 2, 4, 8)  # divide the rows of every item


def refuse(
    index_q: Array,
    index_k: Source,
    block_table: Array,
    positions: Array,
    *,
    top_k: int,
    init_blocks: int,
    local_blocks: int,
) -> str | None:
    """A sentence for what these kernels do not do."""
    choice = {"top_k": top_k, "local_blocks": local_blocks}
    return _refuse_scores(index_q, index_k, block_table) or _refuse_choice(**choice)


def refuse_scores(
    index_q: Array, index_k: Source, block_table: Array, positions: Array
) -> str | None:
    """A sentence for what scores alone are not for."""
    rows = index_q.shape[1] * index_q.shape[2]
    return _refuse_scores(index_q, index_k, block_table) or _refuse_rows(rows)


def refuse_choice(
    scores: Array,
    positions: Array,
    *,
    block_size: int,
    top_k: int,
    init_blocks: int,
    local_blocks: int,
) -> str | None:
    """A sentence for what a choice alone is not for."""
    refusal = refuse_device() or _refuse_choice(top_k=top_k, local_blocks=local_blocks)
    return refusal or _refuse_rows(scores.shape[1] * scores.shape[2])


def _refuse_rows(rows: int) -> str | None:
    if rows > schedule.ROWS[-1]:
        return f"{rows} rows of a sequence, not {schedule.ROWS[-1]} at most"
    return None


def _refuse_scores(index_q: Array, index_k: Source, block_table: Array) -> str | None:
    if reason := refuse_device():
        return reason
    if not isinstance(index_k, Pages) or index_k.component.format != "nvfp4":
        return "index keys are not NVFP4 pages"
    if index_k.compute != "exact":
        return f"cache compute {index_k.compute!r} is not 'exact'"
    if (index_k.block_size, index_k.component.width) != (score.TOKENS, score.WIDTH):
        return f"index pages of {index_k.block_size} x {index_k.component.width}, not 128 x 128"
    if index_q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"index queries are {index_q.dtype}, neither bfloat16 nor float16"
    if index_q.shape[2] not in _HEADS:
        return f"{index_q.shape[2]} index heads, not one of {_HEADS}"
    B, T, K, _ = index_q.shape
    steps = schedule.max_steps(B, T * K, block_table.shape[1])
    if steps > schedule.MAX_STEPS:
        return f"a schedule of {steps} steps is longer than {schedule.MAX_STEPS}"
    return None


def _refuse_choice(*, top_k: int, local_blocks: int) -> str | None:
    if local_blocks < 1:
        return f"local_blocks={local_blocks}: the newest block is not always chosen"
    if top_k > MAX_TOP_K:
        return f"top_k={top_k} is more than {MAX_TOP_K}"
    return None


def block_select(
    index_q: Float[Array, "B T K I"],
    index_k: Source,
    block_table: Int[Array, "B P"],
    positions: Int[Array, "B T"],
    *,
    top_k: int,
    init_blocks: int,
    local_blocks: int,
) -> Int[Array, "B T K C"]:
    """See the package; the best block is first."""
    assert isinstance(index_k, Pages)
    B, T, K, _ = index_q.shape
    P = block_table.shape[1]
    options = {"top_k": top_k, "init_blocks": init_blocks, "local_blocks": local_blocks}
    if B * T * K * P * 4 <= MAX_SCORE_BYTES:
        return _select(index_q, index_k, block_table, positions, **options)
    tokens = min(T, schedule.ROWS[-1] // K)
    parts = -(-T // tokens)
    together = max(1, MAX_SCORE_BYTES // (tokens * K * P * 4))

    groups = -(-B * parts // together)

    def cut(x, fill):
        """[B, T, ...] as [B x parts, tokens, ...], padded with `fill`."""
        return _pad(x, 1, parts * tokens, fill).reshape(B * parts, tokens, *x.shape[2:])

    def group(x, fill):
        """[B x parts, ...] as [groups, together, ...], padded with `fill`."""
        return _pad(x, 0, groups * together, fill).reshape(groups, together, *x.shape[1:])

    tiles = cut(index_q, 0), jnp.repeat(block_table, parts, axis=0), cut(positions, -1)
    ids = lax.map(
        lambda x: _select(x[0], index_k, x[1], x[2], **options),
        tuple(group(x, fill) for x, fill in zip(tiles, (0, -1, -1), strict=True)),
    )
    return ids.reshape(-1, tokens, K, top_k)[: B * parts].reshape(B, -1, K, top_k)[:, :T]


def block_scores(
    index_q: Float[Array, "B T K I"],
    index_k: Source,
    block_table: Int[Array, "B P"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B T K P4"]:
    """See the package."""
    assert isinstance(index_k, Pages)
    B, T, K, _ = index_q.shape
    scores = _items(index_q, index_k, block_table, positions.astype(jnp.int32))  # an item each
    return scores[:, : T * K].reshape(B, T, K, -1)


def best_blocks(
    scores: Float[Array, "B T K P"],
    positions: Int[Array, "B T"],
    *,
    block_size: int,
    top_k: int,
    init_blocks: int,
    local_blocks: int,
) -> Int[Array, "B T K C"]:
    """See the package; the best block is first."""
    B, T, K, P = scores.shape
    return top_blocks(
        _pad(scores.reshape(B, T * K, P), 2, -(-P // STEP) * STEP, 0),
        positions.astype(jnp.int32),
        heads=K,
        block_size=block_size,
        top_k=top_k,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
    )


def _select(index_q, index_k: Pages, block_table, positions, *, top_k: int, **forced: int):
    positions, K = positions.astype(jnp.int32), index_q.shape[2]
    scores = _items(index_q, index_k, block_table, positions)
    size = index_k.block_size
    return top_blocks(scores, positions, heads=K, block_size=size, top_k=top_k, **forced)


def _items(
    index_q, index_k: Pages, block_table, positions: Int[Array, "B T"]
) -> Float[Array, "items N P4"]:
    B, T, K, I = index_q.shape
    size, table = index_k.block_size, block_table.astype(jnp.int32)
    programs = score.programs(B, T * K, table.shape[1])
    plan = schedule.make(positions, table, heads=K, block_size=size, programs=programs)
    line = jnp.asarray(index_k.line, jnp.int32)
    rows = index_q.reshape(B, T * K, I)
    return score.block_scores(rows, index_k.pool, line, plan, table.shape[1])


def _pad(x: Array, axis: int, size: int, fill: int) -> Array:
    widths = [(0, size - x.shape[i] if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=fill)
