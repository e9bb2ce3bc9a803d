"""A CTA's unit of the shared expert in `few_tokens`: MXFP8 codes and exponents by steps of 128
columns, in the slots of the ring that the experts' pages have after them.

Sums are added up by the same parts of K, in the same order, as in `scaled_matmul`, which takes the
shared expert where there are more tokens. Team 1 does the last part, team 0 the others; it adds all
of them, and stores.
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
from pallas_kernels.lanes import REF
from pallas_kernels.layouts.nvfp4_pages import ROWS

_SCALE = mxfp8_lanes.DECODED / page_lanes.DECODED  # in place of an outer scale
_SCALE_BITS = int(np.float32(_SCALE).view(np.int32))
_SUMS = plgpu.ShapeDtypeStruct((64, EIGHT), jnp.float32, layout=plgpu.Layout.WGMMA)


@dataclass(frozen=True, kw_only=True)
class SharedUnit:
    """What one team sees: references, the unit, and its own part of the ring."""

    plan: FewTokens
    matrices: list[tuple[Any, Any]]  # codes and exponents of the first rows, and of the second
    codes: Any  # [slots, lines, 128]
    tables: Any  # [tables, 2, 32, 16]
    rows: Any
    there: Any
    table_there: Any
    last_part: Any  # [512], float32: the sums of team 1
    last_there: Any
    team: Any
    page: Any  # the unit's first rows, in pages of 32
    exists: Any  # whether this CTA has one

    @property
    def part_steps(self) -> int:
        """Of a part of K."""
        return (self.plan.part or 0) // COLUMNS

    @property
    def parts(self) -> int:
        """Of K."""
        return self.plan.launch.columns // (self.plan.part or self.plan.launch.columns)

    @property
    def first_step(self) -> Any:
        """Of this team's."""
        return jnp.where(self.team == 1, (self.parts - 1) * self.part_steps, 0)

    @property
    def count(self) -> Any:
        """Of this team's steps."""
        own = jnp.where(self.team == 0, self.parts - 1, jnp.where(self.team == 1, 1, 0))
        return jnp.where(self.exists, own * self.part_steps, 0)

    def _slot(self, q: Any) -> Any:
        return self.team * self.plan.ring + lax.rem(q, self.plan.ring)

    def _table(self, q: Any) -> Any:
        return self.team * TABLES + lax.rem(lax.div(q, STEPS), TABLES)

    def fetch(self, q: Any) -> None:
        """Starts the copies of this team's q-th step, in one warp."""
        s, apart = self.first_step + q, self.plan.launch.units(1).apart
        slot, table = self._slot(q), self._table(q)
        for half, (codes, powers) in enumerate(self.matrices):
            some = pl.ds((self.page + half * apart) * ROWS, ROWS)
            source = codes.at[some, pl.ds(s * COLUMNS, COLUMNS)]
            to = self.codes.at[slot, pl.ds(half * ROWS, ROWS)]
            plgpu.copy_gmem_to_smem(source, to, self.there.at[slot])

            @pl.when(lax.rem(q, STEPS) == 0)
            def _(some=some, powers=powers, half=half):
                source = powers.at[some, pl.ds(lax.div(s, STEPS) * TABLE, TABLE)]
                to = self.tables.at[table, half]
                plgpu.copy_gmem_to_smem(source, to, self.table_there.at[table])

    def multiply(self, refill: Any, out: Any) -> None:
        """This team's part of the unit; `refill(q)` asks for what takes the place of step q."""

        @pl.when(self.exists & (self.team < 2))
        def _():
            total = self._total(refill)

            @pl.when(self.team == 1)
            def _():
                _keep(total, self.last_part)
                plgpu.barrier_arrive(self.last_there)

            @pl.when(self.team == 0)
            def _():
                plgpu.barrier_wait(self.last_there)
                self._store(total + _kept(self.last_part), out)

    def _total(self, refill: Any) -> Any:
        """The sum of this team's parts."""

        def add(part, total):
            return total + self._sums(part, refill)

        none = plgpu.layout_cast(jnp.zeros((64, EIGHT), jnp.float32), plgpu.Layout.WGMMA)
        return lax.fori_loop(0, jnp.where(self.team == 0, self.parts - 1, 1), add, none)

    def _sums(self, part: Any, refill: Any) -> Any:
        """Of the part-th part that this team has."""
        _, first_row = self._rows()

        def products(sums):
            def step(q, carry):
                self._step(q, first_row, sums)
                sync_team()  # every warp has read the step: the next one may take its place
                refill(q)
                plgpu.wgmma_wait(0)
                return carry

            lax.fori_loop(part * self.part_steps, (part + 1) * self.part_steps, step, None)
            return sums[...]

        sums = plgpu.ACC((64, EIGHT), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        return pl.run_scoped(products, sums)

    def _step(self, q: Any, first_row: Any, sums: Any) -> None:
        slot, table, s = self._slot(q), self._table(q), self.first_step + q

        @pl.when(lax.rem(q, STEPS) == 0)
        def _():
            plgpu.barrier_wait(self.table_there.at[table])

        plgpu.barrier_wait(self.there.at[slot])
        for half, a in enumerate(decoded(self.codes.at[slot], self.tables.at[table], s)):
            operand = self.rows.at[first_row + 2 * s + half]
            plgpu.wgmma(sums, a, operand.transpose((1, 0)))

    def _rows(self) -> tuple[Any, Any]:
        """Which of eight rows are the first ones of the shared expert, and these eight's slab."""
        eight, start = self.plan.rows_at(jnp.int32(2))
        return start, eight * (self.plan.launch.columns // SLAB)

    def _store(self, sums: Any, out: Any) -> None:
        plan, (start, _) = self.plan, self._rows()
        kept = plan.shared_place - start, start, start + plan.tokens
        last = plan.launch.last(jnp.int32(_SCALE_BITS), plan.launch.units(1).apart)
        plan.store_shared(sums, out, self.page, *kept, jnp.int32(_SCALE_BITS), last)


def _keep(sums: Any, memory: Any) -> None:
    """Each thread's four sums to its own place."""

    @lanes.code(plgpu.Layout.WGMMA, REF)
    def store(_, sums, memory):
        (values,) = lanes.tiles_of(sums)
        lanes.store_reals(lanes.address(memory), lanes.thread() << 4, values)

    store(sums, memory)


def _kept(memory: Any) -> Any:
    """What `_keep` stored, to the same threads of another team."""

    @lanes.code(REF, returns=_SUMS)
    def load(_, memory):
        return lanes.array_of([lanes.load_reals(lanes.address(memory), lanes.thread() << 4, 4)])

    return load(memory)


def sync_team() -> None:
    """Waits for the warps of this team."""

    @lanes.code()
    def sync(_):
        lanes.sync_warpgroup()

    sync()
