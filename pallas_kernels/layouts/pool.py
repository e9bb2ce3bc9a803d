"""The page pool: one `uint8 [blocks, lines, 128]` a rank, and where each layer's keys and values
lie in a block's row.

A block holds Z tokens of every layer. Its row of 128-byte lines is, per target layer, K, V and
(sparse layers) the index key, then per draft layer K and V. Each is a `Component`: codes `[head,
token, bytes]`, padded to whole lines, then (NVFP4 only) block scales `[head, token, H / 16]`,
padded likewise. At full width with one KV head a rank, NVFP4 and an FP8 draft that is 14,240 lines
a block. Byte positions inside a row fit int32; blocks and lines are separate indices, so that no
product of the two is ever formed and pools beyond 2^31 bytes address correctly.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.layouts import e4m3, nvfp4

LINE = 128
_CODE_BITS = {"f32": 32, "bf16": 16, "fp8": 8, "nvfp4": 4}


@dataclass(frozen=True, kw_only=True)
class CacheFormats:
    """How keys and values are stored, and how stored NVFP4 is computed with.

    `compute="exact"` expands e2m1 x scale exactly; `"e4m3"` rounds that product, and the queries,
    once more to e4m3, as the Blackwell kernels do (spec/model 2.14).
    """

    kv: str = "bf16"
    index: str = "bf16"
    draft: str = "bf16"
    compute: str = "exact"

    def __post_init__(self) -> None:
        for name in ("kv", "index", "draft"):
            value = getattr(self, name)
            if value not in _CODE_BITS:
                raise ValueError(f"{name} format {value!r} is not one of {', '.join(_CODE_BITS)}")
        if self.compute not in ("exact", "e4m3"):
            raise ValueError(f"cache compute {self.compute!r} is neither 'exact' nor 'e4m3'")

    def rounds_queries(self, fmt: str) -> bool:
        """Whether queries against keys of this format are rounded to e4m3 as well."""
        return self.compute == "e4m3" and fmt == "nvfp4"


@dataclass(frozen=True, kw_only=True)
class Component:
    """One kind of row in a block: Z tokens of some heads in one format."""

    format: str
    heads: int
    tokens: int  # Z
    width: int  # H or I

    @property
    def code_bytes(self) -> int:
        """Bytes of codes a head and token."""
        return self.width * _CODE_BITS[self.format] // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of block scales a head and token."""
        return self.width // nvfp4.GROUP if self.format == "nvfp4" else 0

    @property
    def code_lines(self) -> int:
        """Lines of the codes of all heads and tokens."""
        return _lines(self.heads * self.tokens * self.code_bytes)

    @property
    def lines(self) -> int:
        """Lines of codes and scales."""
        return self.code_lines + _lines(self.heads * self.tokens * self.scale_bytes)


@dataclass(frozen=True, kw_only=True)
class PoolLayout:
    """Line offsets of every layer's components in a block's row on one rank."""

    block_size: int  # Z
    kv_heads: int  # on this rank
    head_dim: int
    index_dim: int
    sparse_layers: tuple[bool, ...]
    draft_layers: int = 0
    formats: CacheFormats = field(default_factory=CacheFormats)
    first_line: int = 0  # of the row that all lines count from

    def __post_init__(self) -> None:
        widths = {"kv": self.head_dim, "index": self.index_dim, "draft": self.head_dim}
        for name, width in widths.items():
            if getattr(self.formats, name) == "nvfp4" and width % nvfp4.GROUP:
                raise ValueError(f"{name} width {width} is not a multiple of {nvfp4.GROUP}")

    @property
    def kv(self) -> Component:
        """K, or V, of one target layer."""
        return self._component(self.formats.kv, self.kv_heads, self.head_dim)

    @property
    def index(self) -> Component:
        """The index key of one sparse layer."""
        return self._component(self.formats.index, 1, self.index_dim)

    @property
    def draft(self) -> Component:
        """K, or V, of one draft layer."""
        return self._component(self.formats.draft, self.kv_heads, self.head_dim)

    @property
    def lines(self) -> int:
        """Lines of one block's row."""
        return self.draft_line(self.draft_layers)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's row."""
        return self.lines * LINE

    def layer_line(self, layer: int) -> int:
        """First line of a target layer: its K; V follows, then the index key."""
        sparse = sum(self.sparse_layers[:layer])
        return self.first_line + 2 * self.kv.lines * layer + self.index.lines * sparse

    def draft_line(self, layer: int) -> int:
        """First line of a draft layer: its K; V follows."""
        return self.layer_line(len(self.sparse_layers)) + 2 * self.draft.lines * layer

    @property
    def draft_part(self) -> "PoolLayout":
        """The draft layers as a layout of their own: layers without an index in the draft's format,
        at their lines of the same row.
        """
        return replace(
            self,
            sparse_layers=(False,) * self.draft_layers,
            draft_layers=0,
            formats=replace(self.formats, kv=self.formats.draft),
            first_line=self.draft_line(0),
        )

    def empty(self, num_blocks: int) -> UInt8[Array, "P lines 128"]:
        """A pool of zeros for one rank."""
        return jnp.zeros((num_blocks, self.lines, LINE), jnp.uint8)

    def _component(self, fmt: str, heads: int, width: int) -> Component:
        return Component(format=fmt, heads=heads, tokens=self.block_size, width=width)


def encode(
    x: Float[Array, "*rows H"], fmt: str
) -> tuple[UInt8[Array, "*rows bytes"], UInt8[Array, "*rows scales"] | None]:
    """The bytes a format stores for each row: codes, and block scales (NVFP4) or None."""
    if fmt == "nvfp4":
        codes, scales = nvfp4.encode(x.astype(jnp.float32))
        return codes, lax.bitcast_convert_type(scales, jnp.uint8)
    if fmt == "fp8":
        return lax.bitcast_convert_type(e4m3.round_to(x.astype(jnp.float32)), jnp.uint8), None
    if fmt == "bf16":
        # XLA on a GPU drops a float32 -> bfloat16 -> float32 pair; this rounding it keeps
        x = lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
    dtype = {"f32": jnp.float32, "bf16": jnp.bfloat16}[fmt]
    parts = lax.bitcast_convert_type(x.astype(dtype), jnp.uint8)
    return parts.reshape(*x.shape[:-1], -1), None


def decode(
    codes: UInt8[Array, "*rows bytes"],
    scales: UInt8[Array, "*rows scales"] | None,
    fmt: str,
    compute: str = "exact",
) -> Float[Array, "*rows H"]:
    """float32 values of stored bytes; `compute` as in `CacheFormats`."""
    if fmt == "nvfp4":
        assert scales is not None
        values = nvfp4.decode(codes, lax.bitcast_convert_type(scales, jnp.float8_e4m3fn))
        return e4m3.to_float(e4m3.round_to(values)) if compute == "e4m3" else values
    if fmt == "fp8":
        return e4m3.to_float(lax.bitcast_convert_type(codes, jnp.float8_e4m3fn))
    dtype, size = {"f32": (jnp.float32, 4), "bf16": (jnp.bfloat16, 2)}[fmt]
    width = codes.shape[-1] // size
    parts = codes.reshape(*codes.shape[:-1], width, size)
    return lax.bitcast_convert_type(parts, dtype).astype(jnp.float32)


def through_cache(
    x: Float[Array, "*rows H"], fmt: str, compute: str = "exact"
) -> Float[Array, "*rows H"]:
    """What the cache gives back for x, in x's dtype; the gradient passes straight through."""
    if fmt == "f32":
        return x
    stored = decode(*encode(lax.stop_gradient(x), fmt), fmt, compute)
    return _straight_through(x, stored.astype(x.dtype))


def through_record(
    x: Float[Array, "P Z heads width"],
    pool: UInt8[Array, "P lines 128"],
    component: Component,
    line: Int[Array, ""] | int,
    compute: str = "exact",
) -> Float[Array, "P Z heads width"]:
    """As `through_cache`, but with the bytes that a pool holds for these blocks instead of x's own:
    where the two differ, a rounding tipped over between x and what was stored.
    """
    block_ids = jnp.broadcast_to(jnp.arange(len(pool)), (component.heads, len(pool)))
    stored_KPZH = gather(pool, component, line, block_ids, compute)
    return _straight_through(x, jnp.moveaxis(stored_KPZH, 0, 2).astype(x.dtype))


def write(
    pool: UInt8[Array, "P lines 128"],
    component: Component,
    line: Int[Array, ""] | int,
    block_ids: Int[Array, "T"],
    slots: Int[Array, "T"],
    values: Float[Array, "T heads width"],
) -> UInt8[Array, "P lines 128"]:
    """Stores each token's rows at (block, slot), in place when the pool is donated.

    A block id outside the pool (-1 marks padding) is dropped: never clamped onto another block.
    """
    codes, scales = encode(values, component.format)
    pool = _scatter(pool, line, component.tokens, block_ids, slots, codes)
    if scales is None:
        return pool
    return _scatter(pool, line + component.code_lines, component.tokens, block_ids, slots, scales)


def gather(
    pool: UInt8[Array, "P lines 128"],
    component: Component,
    line: Int[Array, ""] | int,
    block_ids: Int[Array, "*batch heads C"],
    compute: str = "exact",
) -> Float[Array, "*batch heads C Z width"]:
    """float32 rows of whole blocks, each head's from its own list of ids; ids outside the pool give
    zeros.
    """
    codes = _slices(pool, line, component.tokens, component.code_bytes, block_ids)
    if not component.scale_bytes:
        return decode(codes, None, component.format, compute)
    line = line + component.code_lines
    scales = _slices(pool, line, component.tokens, component.scale_bytes, block_ids)
    return decode(codes, scales, component.format, compute)


@jax.custom_jvp
def _straight_through(x: jax.Array, stored: jax.Array) -> jax.Array:
    return stored


@_straight_through.defjvp
def _(primals, tangents):
    return _straight_through(*primals), tangents[0]


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE)


def _scatter(pool, line, tokens, block_ids, slots, rows_THb):
    if rows_THb.shape[:2] == (1, 1):
        # XLA turns a scatter of one row into a dynamic-update-slice, fuses it into the readers and
        # copies the pool for that; a second row that is dropped keeps it a scatter, in place
        rows_THb = jnp.concatenate([rows_THb, rows_THb])
        block_ids, slots = jnp.append(block_ids, -1), jnp.append(slots, 0)
    _, heads, size = rows_THb.shape
    offset = (jnp.arange(heads) * tokens + slots[:, None]) * size + line * LINE  # [T, heads]
    where = jnp.stack([jnp.broadcast_to(block_ids[:, None], offset.shape), offset], -1)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(2,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    flat = pool.reshape(pool.shape[0], -1)
    flat = lax.scatter(flat, where, rows_THb, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP)
    return flat.reshape(pool.shape)


def _slices(pool, line, tokens, size, block_ids):
    heads = block_ids.shape[-2]
    offset = line * LINE + jnp.arange(heads)[:, None] * (tokens * size)
    where = jnp.stack([block_ids, jnp.broadcast_to(offset, block_ids.shape)], -1)
    batch = block_ids.ndim
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(batch,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )
    flat = pool.reshape(pool.shape[0], -1)
    rows = lax.gather(
        flat,
        where,
        numbers,
        slice_sizes=(1, tokens * size),
        mode=lax.GatherScatterMode.FILL_OR_DROP,
        fill_value=0,
    )
    return rows.reshape(*block_ids.shape, tokens, size)
