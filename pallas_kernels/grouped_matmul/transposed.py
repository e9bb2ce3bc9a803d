"""What comes back through NVFP4 pages: sorted rows of a gradient times their experts' matrices as
these are stored, [S, F] x [F, D], where the forward product is with their transposes.

Grid: one CTA a multiprocessor, which takes every G-th unit of 128 rows of one expert and 256
columns, all of F, in steps of 64. One warpgroup copies 2 x 2 pages and 64 columns of the gradient a
step, and decodes pages into bfloat16 in shared memory; two multiply 64 rows each.

Memory: 0.5625 bytes a weight and 128 rows, 2 bytes an element of the gradient and 256 columns, from
the L2; results once. A weight is decoded once for 128 rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16

from pallas_kernels import lanes
from pallas_kernels.grouped_matmul.grouping import EIGHT, Grouping
from pallas_kernels.grouped_matmul.launch import MULTIPROCESSORS, PAGE_BYTES, SWIZZLED
from pallas_kernels.grouped_matmul.page_lanes import DECODED, code_pairs, scale_pairs
from pallas_kernels.grouped_matmul.products import scale_bits
from pallas_kernels.lanes import REF, SCALAR
from pallas_kernels.layouts.nvfp4_pages import CODE_BYTES, COLUMNS, LINE, LINES, ROWS, NVFP4Pages

TEAM_ROWS, TEAMS = 64, 2
GROUP_ROWS = TEAMS * TEAM_ROWS  # rows of a group, at most
WIDE, HIGH = 2, 2  # pages of a step
UNIT_COLUMNS, DEPTH = WIDE * COLUMNS, HIGH * ROWS  # of the result; of the contraction, a step
_PAGE_RING, _ROW_RING, _SLOTS = 4, 5, 3  # steps of pages, rows and decoded pages: 213 KiB
_WGMMA = plgpu.Layout.WGMMA


def product(
    rows: BFloat16[Array, "S F"], matrices: NVFP4Pages, groups: Grouping
) -> BFloat16[Array, "S D"]:
    """Each place's row times its expert's matrix, rounded; places of no row are unspecified. Groups
    have at most `GROUP_ROWS` rows.
    """
    _, F, D = matrices.shape
    assert groups.widths[-1] <= GROUP_ROWS and F % DEPTH == 0 and D % UNIT_COLUMNS == 0
    kernel = plgpu.kernel(
        functools.partial(_program, F // DEPTH, D // UNIT_COLUMNS),
        out_type=jax.ShapeDtypeStruct((len(rows), D), rows.dtype),
        grid=(MULTIPROCESSORS,),
        grid_names=("cta",),
        num_threads=TEAMS + 1,
        thread_name="team",
        scratch_types=[
            plgpu.SMEM((_ROW_RING, TEAMS, TEAM_ROWS, DEPTH), rows.dtype, transforms=SWIZZLED),
            plgpu.SMEM((_PAGE_RING, HIGH, WIDE, LINES, LINE), jnp.uint8),
            plgpu.SMEM((_SLOTS, DEPTH, UNIT_COLUMNS), rows.dtype, transforms=SWIZZLED),
            plgpu.Barrier(num_arrivals=TEAMS, num_barriers=_ROW_RING),
            plgpu.Barrier(num_arrivals=1, num_barriers=_PAGE_RING),
            plgpu.Barrier(num_arrivals=1, num_barriers=_SLOTS),
            plgpu.Barrier(num_arrivals=TEAMS, num_barriers=_SLOTS),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(rows, matrices.pages, scale_bits(matrices), *groups.operands)


def _program(
    steps: int, blocks: int,
    x, weights, scales, num_groups, experts, firsts, counts, out,
    rows, pages, matrices, rows_there, pages_there, decoded, multiplied,
):  # fmt: skip
    cta, team = lax.axis_index("cta"), lax.axis_index("team")
    last = num_groups[0] * blocks + (MULTIPROCESSORS - 1) - cta
    own = lax.div(last, MULTIPROCESSORS)
    total = own * steps

    def unit(i):
        """Group and block of columns of this CTA's i-th unit."""
        u = cta + i * MULTIPROCESSORS
        group = lax.div(u, blocks)
        return group, u - group * blocks

    def place_of(n):
        """Of the n-th step: its unit's group and block, and which step of the unit it is."""
        i = lax.div(n, steps)
        return *unit(i), n - i * steps

    def copy_rows(n):
        @pl.when(n < total)
        def _():
            group, _, s = place_of(n)
            slot, place = lax.rem(n, _ROW_RING), firsts[group] * EIGHT
            for half in range(TEAMS):
                some = pl.ds(place + half * TEAM_ROWS, TEAM_ROWS)
                source = x.at[some, pl.ds(s * DEPTH, DEPTH)]
                plgpu.copy_gmem_to_smem(source, rows.at[slot, half], rows_there.at[slot])

    def copy_pages(n):
        @pl.when(n < total)
        def _():
            group, block, s = place_of(n)
            slot = lax.rem(n, _PAGE_RING)
            source = weights.at[experts[group], pl.ds(s * HIGH, HIGH), pl.ds(block * WIDE, WIDE)]
            plgpu.copy_gmem_to_smem(source, pages.at[slot], pages_there.at[slot])

    def decode(n, carry):
        slot, to = lax.rem(n, _PAGE_RING), lax.rem(n, _SLOTS)
        plgpu.barrier_wait(pages_there.at[slot])

        @pl.when(n >= _SLOTS)
        def _():
            plgpu.barrier_wait(multiplied.at[to])
            copy_rows(n - _SLOTS + _ROW_RING)

        expand(x.dtype)(pages.at[slot], matrices.at[to])
        plgpu.commit_smem()
        plgpu.barrier_arrive(decoded.at[to])
        copy_pages(n + _PAGE_RING)  # every warp has read its part: `commit_smem` waits for all
        return carry

    def multiply(i, carry):
        group, block = unit(i)

        def products(sums):
            def step(s, carry):
                n = i * steps + s
                slot, at = lax.rem(n, _ROW_RING), lax.rem(n, _SLOTS)
                plgpu.barrier_wait(rows_there.at[slot])
                plgpu.barrier_wait(decoded.at[at])
                plgpu.wgmma(sums, rows.at[slot, team], matrices.at[at])
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(multiplied.at[at])
                return carry

            lax.fori_loop(0, steps, step, None)
            return sums[...]

        sums = plgpu.ACC((TEAM_ROWS, UNIT_COLUMNS), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        sums = pl.run_scoped(products, sums)
        first, scale = team * TEAM_ROWS, scales[experts[group]]
        place = firsts[group] * EIGHT + first
        store(out.shape[1])(sums, out, place, block, counts[group] - first, scale)
        return carry

    @pl.when(team < TEAMS)
    def _():
        lax.fori_loop(0, own, multiply, None)

    @pl.when(team == TEAMS)
    def _():
        for n in range(_PAGE_RING):
            copy_pages(jnp.int32(n))
        for n in range(_ROW_RING):
            copy_rows(jnp.int32(n))
        lax.fori_loop(0, total, decode, None)


def expand(dtype: Any) -> Any:
    """Pages [2, 2, 18, 128] into their values / `DECODED`, [64, 256], as wgmma reads them: tiles of
    8 rows x 64 columns, 16 bytes c of row r at c ^ r. A lane has 32 columns of a row of each page.
    """

    @lanes.code(REF, plgpu.RefType(SWIZZLED))
    def expand(_, pages, matrix):
        g, t, warp = lanes.lane() >> 2, lanes.lane() & 3, lanes.warp()
        place = (warp << 5) + lanes.lane()
        to = lanes.address(matrix)
        for page in range(HIGH * WIDE):
            high, wide = divmod(page, WIDE)
            source = lanes.address(pages, page * PAGE_BYTES)
            words = lanes.load_words(source, place << 4, 4)
            scaled = scale_pairs(lanes.load_bits(source, (place << 1) + CODE_BYTES, 16), dtype)
            tile = ((warp + 4 * high) << 2) + (t >> 1) + 2 * wide
            for v, word in enumerate(words):
                pairs = [lanes.multiply_bf16(x, scaled[v // 2]) for x in code_pairs(word, dtype)]
                sixteen = (((t & 1) << 2) + v) ^ g
                lanes.store_words(to, (tile << 10) + (g << 7) + (sixteen << 4), pairs)

    return expand


def store(width: int) -> Any:
    """Sums of 64 rows and a block of columns into out [S, `width`] from row `place` on, if they are
    among the first `count`.
    """

    @lanes.code(_WGMMA, REF, *[SCALAR] * 4)
    def store(_, sums, out, place, block, count, scale):
        g, t = lanes.lane() >> 2, lanes.lane() & 3
        scale = lanes.real_of_bits(lanes.scalar(scale)) * lanes.real(DECODED)
        column = lanes.scalar(block) * UNIT_COLUMNS + (t << 1)
        tiles = lanes.tiles_of(sums)
        for half in (0, 1):
            row = (lanes.warp() << 4) + g + 8 * half
            to = lanes.element(lanes.address(out), lanes.scalar(place) + row, width * 2)

            def write(to=to, half=half):
                for i, tile in enumerate(tiles):
                    pair = [x * scale for x in tile[2 * half : 2 * half + 2]]
                    lanes.store_words(to, (column + 8 * i) << 1, [lanes.bf16_of_reals(*pair)])

            lanes.when(row.below(lanes.scalar(count)), write)

    return store
