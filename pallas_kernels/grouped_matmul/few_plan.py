"""How products of at most 8 tokens are dealt out: units, places, rows, memory (`few_tokens`)."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul import shared_lanes
from pallas_kernels.grouped_matmul.few_groups import LIST
from pallas_kernels.grouped_matmul.grouping import EIGHT
from pallas_kernels.grouped_matmul.launch import MEMORY, PAGE_BYTES, Launch
from pallas_kernels.layouts.nvfp4_pages import ROWS

TEAMS = 4
WIDE = 2  # pages along K of a step
SLOT = 2 * WIDE * PAGE_BYTES  # bytes of a step in the ring; one of MXFP8 takes less
TABLES = 2  # of exponents, for each team
KEPT = 512  # sums that one team leaves for another
TABLE_BYTES = 2 * ROWS * shared_lanes.TABLE


@dataclass(frozen=True, kw_only=True)
class FewTokens:
    """A launch for `tokens` tokens, `choices` experts each.

    Gate and up see the tokens as they are. Down has other rows for each group (`by_group`); those
    of two groups and of the shared expert lie side by side where 8 rows have room.
    """

    launch: Launch
    tokens: int
    choices: int
    experts: int
    by_group: bool
    part: int | None = None  # columns of the shared expert that are summed at a time; None: no such
    store_shared: Any = None  # as `launch.store`

    @property
    def pairs(self) -> int:
        """Of tokens and experts."""
        return self.tokens * self.choices

    @property
    def shared_place(self) -> int:
        """The first of the shared expert's places: after those of all groups that there may be."""
        return EIGHT * min(self.pairs, self.experts)

    def rows_at(self, j: Any) -> tuple[Any, Any]:
        """Which eight rows, and the first of them, that a CTA's first or second group has (j = 0,
        1), or the shared expert (2).
        """
        if not self.by_group:
            return 0 * j, 0 * j
        together = EIGHT // self.tokens
        return lax.div(j, together), lax.rem(j, together) * self.tokens

    @property
    def eights(self) -> int:
        """Eight rows at a time that shared memory holds."""
        return -(-3 // (EIGHT // self.tokens)) if self.by_group else 1

    @property
    def ring(self) -> int:
        """Steps that each team has under way."""
        taken = self.eights * EIGHT * self.launch.columns * 2 + TEAMS * TABLES * TABLE_BYTES
        return min((MEMORY - taken - 4 * (LIST + KEPT)) // (TEAMS * SLOT), self.launch.steps(WIDE))


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Which of a CTA's `count` units a team has: the last team the first one, and so on. Where
    there is a unit of the shared expert, most of which is team 0's, this misses its first turn.
    """

    count: Any
    has_shared: Any
    team: Any

    @property
    def _turn(self) -> Any:
        return TEAMS - 1 - self.team

    @property
    def _missed(self) -> Any:
        return jnp.where(self.has_shared & (self.team == 0), 1, 0)

    @property
    def own(self) -> Any:
        """How many this team has."""
        is_missed = self.has_shared & (self.count >= TEAMS)
        turns = self.count + jnp.where(is_missed, 1, 0)
        return jnp.maximum(lax.div(turns - self._turn + (TEAMS - 1), TEAMS) - self._missed, 0)

    def unit(self, i: Any) -> Any:
        """This team's i-th."""
        at = self._turn + (i + self._missed) * TEAMS
        return at - jnp.where(self.has_shared & (at >= TEAMS - 1), 1, 0)
