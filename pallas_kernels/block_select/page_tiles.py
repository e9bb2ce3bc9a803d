"""Products of query rows with one page of NVFP4 keys in each warp; the maximum over the tokens.

A lane (g, t) = (lane / 4, lane % 4) reads 16 bytes of token row 8 i + g, the 32 dimensions from
32 t, and the two scales of these: decoded, they are the A operand of a tile of 16 tokens. The
contraction's order is free, so the queries are permuted, not the keys. Both ways of multiplying
give the maximum over the tiles as `query_rows` packs it, warp w's of its page.

* `Few`, N <= 16: each warp by itself, mma.m16n8k16, queries in registers.
* `Many`: the four warps together, wgmma, queries in shared memory, some tiles in flight.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes, nvfp4_lanes
from pallas_kernels.block_select.query_rows import fold, pack, packed_type, place_rows, unpack
from pallas_kernels.lanes import REF, SCALAR, Word

CODE_BYTES, PAGE_BYTES = 8192, 9216
TILES = 8  # of 16 tokens
_WGMMA = plgpu.Layout.WGMMA
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_FLIGHT = {32: 4, 64: 2, 128: 1}  # tiles of `Many` at once, by N: as many as registers allow


class Few:
    """Queries [N / 8, 4, 32 lanes, 4 words]: for word w of a lane's codes, its four half2 pairs."""

    @staticmethod
    def scratch(num_rows: int, teams: int) -> Any:
        """Where the queries of some programs lie."""
        return plgpu.SMEM((teams * num_rows // 8, 4, 32, 8), jnp.float16)

    @staticmethod
    def of_team(queries: Any, num_rows: int, team: Any) -> Any:
        """Those of one of them."""
        return queries.at[pl.ds(team * (num_rows // 8), num_rows // 8)]

    @staticmethod
    def load(q: Any, queries: Any, num_rows: int, start: Any, end: Any) -> None:
        """Brings an item's rows there."""

        @lanes.code(REF, REF, SCALAR, SCALAR)
        def load(_, q_ref, queries, start, end):
            to = lanes.address(queries)

            def place(row, chunk, words):
                lane = ((row & 7) << 2) + (chunk >> 2)
                at = ((row >> 3) << 11) + ((chunk & 3) << 9) + (lane << 4)
                lanes.store_words(to, at, words)

            bounds = lanes.scalar(start), lanes.scalar(end)
            place_rows(q_ref, q.dtype, num_rows, bounds, place)

        load(q, queries, start, end)

    @staticmethod
    def best(pages: Any, queries: Any, num_rows: int) -> Any:
        """The maximum over eight tiles."""

        @lanes.code(REF, REF, returns=packed_type(num_rows))
        def best(_, pages, queries):
            page, rows = lanes.address(pages, lanes.warp() * PAGE_BYTES), lanes.address(queries)
            b = [[_words(rows, n, w) for w in range(4)] for n in range(num_rows // 8)]
            found = None
            for tile in range(TILES):
                found = fold(_multiply(page, tile, b), found)
            assert found is not None
            return pack(found)

        return best(pages, queries)


class Many:
    """Queries [2, N, 64], swizzled: two B operands. Of chunk 4 t + w, pair i is elements
    32 (w % 2) + 8 i + 2 t and the next one of operand w / 2.
    """

    @staticmethod
    def scratch(num_rows: int, teams: int) -> Any:
        """Where the queries of some programs lie."""
        return plgpu.SMEM((teams * 2, num_rows, 64), jnp.float16, transforms=_SWIZZLED)

    @staticmethod
    def of_team(queries: Any, num_rows: int, team: Any) -> Any:
        """Those of one of them."""
        return queries.at[pl.ds(team * 2, 2)]

    @staticmethod
    def load(q: Any, queries: Any, num_rows: int, start: Any, end: Any) -> None:
        """Brings an item's rows there."""

        @lanes.code(REF, plgpu.RefType(_SWIZZLED), SCALAR, SCALAR)
        def load(_, q_ref, queries, start, end):
            to = lanes.address(queries)

            def place(row, chunk, words):
                t, w = chunk >> 2, chunk & 3
                at = (w >> 1) * (num_rows * 128) + (row << 7) + (t << 2)
                for i, one in enumerate(words):
                    piece = (((w & 1) << 2) + i) ^ (row & 7)
                    lanes.store_words(to, at + (piece << 4), [one])

            bounds = lanes.scalar(start), lanes.scalar(end)
            place_rows(q_ref, q.dtype, num_rows, bounds, place)

        load(q, queries, start, end)

    @staticmethod
    def best(pages: Any, queries: Any, num_rows: int) -> Any:
        """The maximum over eight tiles."""
        flight = _FLIGHT[num_rows]
        found: list[Any] = []
        for first in range(0, TILES, flight):

            def products(*sums, first=first):
                for tile, total in enumerate(sums, first):
                    for half, a in enumerate(_operands(tile, pages)):
                        plgpu.wgmma(total, a, queries.at[half].transpose((1, 0)))
                return [total[...] for total in sums]

            sums = plgpu.ACC((64, num_rows), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
            for part in pl.run_scoped(products, *[sums] * flight):
                found = [_fold(num_rows, part, *found)]
        return found[0]


def _words(rows: Any, group: int, w: int) -> list[Word]:
    """The four pairs of word w of this lane's query, of 8 g .. 8 g + 7."""
    return lanes.load_words(rows, (lanes.lane() << 4) + (2048 * group + 512 * w), 4)


def _decoded(page: Any, tile: int) -> list[list[list[Word]]]:
    """half2 words of a tile [rows g, g + 8][4 words][4 pairs]."""
    rows = []
    for row in (2 * tile, 2 * tile + 1):  # of eight tokens
        codes = lanes.load_words(page, (lanes.lane() << 4) + 512 * row, 4)
        scales = lanes.load_bits(page, (lanes.lane() << 1) + (CODE_BYTES + 64 * row), 16)
        steps = nvfp4_lanes.scale_pairs(scales)
        pairs = [nvfp4_lanes.code_pairs(one) for one in codes]
        rows.append([[lanes.multiply_half2(x, steps[w // 2]) for x in pairs[w]] for w in range(4)])
    return rows


def _multiply(page: Any, tile: int, b: list[list[list[Word]]]) -> list[list[Any]]:
    """One warp's sums of a tile, per 8 query rows."""
    low, high = _decoded(page, tile)
    sums = [[lanes.real(0.0)] * 4 for _ in b]
    for w in range(4):
        for i in (0, 2):
            a = [low[w][i], high[w][i], low[w][i + 1], high[w][i + 1]]
            sums = [
                lanes.multiply_tile(one, a, query[w][i : i + 2])
                for one, query in zip(sums, b, strict=True)
            ]
    return sums


def _operands(tile: int, pages: Any) -> tuple[Any, Any]:
    """A tile of each warp's page as two A operands (64, 64): codes of words 0, 1 and of 2, 3."""
    half = plgpu.ShapeDtypeStruct((64, 64), jnp.float16, layout=_WGMMA)

    @lanes.code(REF, returns=(half, half))
    def decode(_, pages):
        low, high = _decoded(lanes.address(pages, lanes.warp() * PAGE_BYTES), tile)
        columns = [[low[w][i], high[w][i]] for w in range(4) for i in range(4)]
        return lanes.half_accumulator(columns[:8]), lanes.half_accumulator(columns[8:])

    return decode(pages)


def _fold(num_rows: int, sums: Any, *found: Any) -> Any:
    """The maximum of a tile and of what was found before, if anything was."""

    @lanes.code(_WGMMA, *[_WGMMA] * len(found), returns=packed_type(num_rows))
    def folded(_, sums, *found):
        before = unpack(found[0], num_rows) if found else None
        return pack(fold(lanes.tiles_of(sums), before))

    return folded(sums, *found)
