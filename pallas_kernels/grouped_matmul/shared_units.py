"""A team's units of the shared expert in `few_tokens`: MXFP8 codes and exponents by steps of 128
columns, in the slots of the ring that the experts' pages have before them.

Sums are added up by the same parts of K, in the same order, as in `scaled_matmul.few_rows`, which
takes the shared expert where there are more tokens.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes, mxfp8_lanes
from pallas_kernels.grouped_matmul import page_lanes
from pallas_kernels.grouped_matmul.few_plan import TABLES, FewTokens
from pallas_kernels.grouped_matmul.grouping import EIGHT
from pallas_kernels.grouped_matmul.matching_rows import SLAB
from pallas_kernels.grouped_matmul.shared_lanes import COLUMNS, STEPS, TABLE, decoded
from pallas_kernels.layouts.nvfp4_pages import ROWS

_SCALE = mxfp8_lanes.DECODED / page_lanes.DECODED  # in place of an outer scale
_SCALE_BITS = int(np.float32(_SCALE).view(np.int32))


@dataclass(frozen=True, kw_only=True)
class SharedUnits:
    """What one team sees: references, and where its units and its part of the ring are."""

    plan: FewTokens
    matrices: list[tuple[Any, Any]]  # codes and exponents of the first rows, and of the second
    codes: Any  # [slots, lines, 128]
    tables: Any  # [tables, 2, 32, 16]
    rows: Any
    there: Any
    table_there: Any
    team: Any
    first: Any  # unit of this team; the next ones are `stride` units apart
    stride: int
    count: Any
    steps_before: Any  # steps of the ring that other units had

    def page(self, i: Any) -> Any:
        """The first rows of the i-th unit, in pages of 32."""
        return (self.first + i * self.stride) * self.plan.launch.units(1).stride

    def _slot(self, q: Any) -> Any:
        return self.team * self.plan.ring + lax.rem(self.steps_before + q, self.plan.ring)

    def _table(self, q: Any) -> Any:
        return self.team * TABLES + lax.rem(lax.div(q, STEPS), TABLES)

    def fetch(self, q: Any) -> None:
        """Starts the copies of the q-th step, if there are so many."""
        s, apart = lax.rem(q, self.plan.shared_steps), self.plan.launch.units(1).apart
        slot, table = self._slot(q), self._table(q)

        @pl.when(q < self.count * self.plan.shared_steps)
        def _():
            page = self.page(lax.div(q, self.plan.shared_steps))
            for half, (codes, powers) in enumerate(self.matrices):
                some = pl.ds((page + half * apart) * ROWS, ROWS)
                source = codes.at[some, pl.ds(s * COLUMNS, COLUMNS)]
                to = self.codes.at[slot, pl.ds(half * ROWS, ROWS)]
                plgpu.copy_gmem_to_smem(source, to, self.there.at[slot])

                @pl.when(lax.rem(s, STEPS) == 0)
                def _(some=some, powers=powers, half=half):
                    source = powers.at[some, pl.ds(lax.div(s, STEPS) * TABLE, TABLE)]
                    to = self.tables.at[table, half]
                    plgpu.copy_gmem_to_smem(source, to, self.table_there.at[table])

    def multiply(self, i: Any, out: Any) -> None:
        """All of the i-th unit, from its products to what is stored."""
        plan, launch = self.plan, self.plan.launch
        assert plan.part is not None
        parts, steps = launch.columns // plan.part, plan.part // COLUMNS
        eight, start = plan.rows_at(jnp.int32(2))
        first_row = eight * (launch.columns // SLAB)

        def of_part(part, total):
            def products(sums):
                def step(s, carry):
                    self._step(i * plan.shared_steps + s, s, first_row, sums)
                    return carry

                lax.fori_loop(part * steps, (part + 1) * steps, step, None)
                return sums[...]

            sums = plgpu.ACC((64, EIGHT), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
            return total + pl.run_scoped(products, sums)

        none = plgpu.layout_cast(jnp.zeros((64, EIGHT), jnp.float32), plgpu.Layout.WGMMA)
        sums = lax.fori_loop(0, parts, of_part, none)
        kept = plan.shared_place - start, start, start + plan.tokens
        scale = jnp.int32(_SCALE_BITS)
        last = launch.last(scale, launch.units(1).apart)
        plan.store_shared(sums, out, self.page(i), *kept, scale, last)

    def _step(self, q: Any, s: Any, first_row: Any, sums: Any) -> None:
        slot, table = self._slot(q), self._table(q)

        @pl.when(lax.rem(s, STEPS) == 0)
        def _():
            plgpu.barrier_wait(self.table_there.at[table])

        plgpu.barrier_wait(self.there.at[slot])
        for half, a in enumerate(decoded(self.codes.at[slot], self.tables.at[table], s)):
            operand = self.rows.at[first_row + 2 * s + half]
            plgpu.wgmma(sums, a, operand.transpose((1, 0)))
        sync_team()  # every warp has read the step: the next one may take its place
        self.fetch(q + self.plan.ring)
        plgpu.wgmma_wait(0)


def sync_team() -> None:
    """Waits for the warps of this team."""

    @lanes.code()
    def sync(_):
        lanes.sync_warpgroup()

    sync()
