"""What a verification commits: the kept drafts and the token after them, cut at a stop token. The
limits need no cut: widths are chosen so that nothing reaches beyond them.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from minimax_jax.sampling import is_stop
from minimax_jax.speculation import Verdict
from minimax_jax.speculative.verify_rows import VerifyRows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Anchors:
    """The newest token of B sequences. Neither its keys nor its draft context are in the pages yet;
    those of all tokens before it are.
    """

    tokens: Int[Array, "B"]
    positions: Int[Array, "B"]
    limits: Int[Array, "B"]  # the first position that is not generated any more
    running: Bool[Array, "B"]  # whether a token after the anchor is wanted

    @property
    def room(self) -> Int[Array, "B"]:
        """How many drafts may be tested: with the token after them they reach up to the limit."""
        return self.limits - self.positions - 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Committed:
    """The new tokens of each sequence, -1 past the last of `count`; `accepted` of them are drafts.

    `stopped` is set where one is a stop token, which is then the last.
    """

    tokens: Int[Array, "B places"]
    count: Int[Array, "B"]
    accepted: Int[Array, "B"]
    stopped: Bool[Array, "B"]

    def keeps(self, rows: VerifyRows) -> Bool[Array, "M"]:
        """The rows whose tokens are committed: anchors and drafts. The token after the drafts has
        not been run.
        """
        last = jnp.where(self.count > 0, self.accepted, -1)
        return (rows.offsets >= 0) & (rows.offsets <= last[rows.sequences])

    def anchors(self, before: Anchors) -> Anchors:
        """The newest tokens then; a sequence without new ones has ended."""
        last = jnp.maximum(self.count - 1, 0)
        newest = jnp.take_along_axis(self.tokens, last[:, None], axis=1)[:, 0]
        positions = before.positions + self.count
        return Anchors(
            tokens=jnp.where(self.count > 0, newest, before.tokens),
            positions=positions,
            limits=before.limits,
            running=(self.count > 0) & ~self.stopped & (positions + 1 < before.limits),
        )


def commit(
    drafts: Int[Array, "B T"],
    verdict: Verdict,
    going: Bool[Array, "B"],
    stop_ids: Int[Array, "B stops"],
) -> Committed:
    """What the verdict commits of each sequence that is `going`; nothing of the others."""
    columns = jnp.arange(drafts.shape[1] + 1)
    followed = jnp.pad(drafts, ((0, 0), (0, 1)))  # the last column is never a draft
    kept = columns < verdict.accepted[:, None]
    tokens = jnp.where(kept, followed, verdict.token[:, None])
    stops = is_stop(tokens, stop_ids) & (columns <= verdict.accepted[:, None])
    stopped = jnp.any(stops, axis=1) & going
    count = jnp.where(stopped, jnp.argmax(stops, axis=1), verdict.accepted) + 1
    count = jnp.where(going, count, 0)
    return Committed(
        tokens=jnp.where(columns < count[:, None], tokens, -1),
        count=count,
        accepted=jnp.minimum(verdict.accepted, count),
        stopped=stopped,
    )
