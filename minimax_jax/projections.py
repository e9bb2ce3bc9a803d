"""What an attention layer makes of the stream before anything is cached or attended to, and the
norms of it.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from minimax_jax.split_pages import group_heads
from pallas_kernels.kv_insert import Query


class Projections(NamedTuple):
    """What attention makes of the stream, before norms and rotation. A dense layer has no index."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]
    index_q: Float[Array, "B T K I"] | None
    index_k: Float[Array, "B T 1 I"] | None

    def of_rank(self, kv_heads: int, n: int) -> "Projections":
        """The heads that a rank's pages, with so many key heads, are for: its own, or its group's
        where n ranks share out pages.
        """
        index_q = None if self.index_q is None else group_heads(self.index_q, kv_heads, n)
        return self._replace(
            q=group_heads(self.q, self.q.shape[2] * n, n),
            k=group_heads(self.k, kv_heads, n),
            v=group_heads(self.v, kv_heads, n),
            index_q=index_q,
        )

    def queries(self, norms: "Norms") -> list[Query]:
        """The queries of the heads, and those of the index if there is one."""
        found = [Query(self.q, norms.q)]
        if self.index_q is not None and norms.index_q is not None:
            found.append(Query(self.index_q, norms.index_q))
        return found


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Norms:
    """The weights of the four norms, and what they add to a mean square."""

    q: Float[Array, "H"]
    k: Float[Array, "H"]
    index_q: Float[Array, "I"] | None
    index_k: Float[Array, "I"] | None
    eps: float = field(metadata={"static": True})
