"""Where an attention op reads keys and values from: pages of the pool, or plain arrays of blocks
(training).

Both answer `read(source, block_ids)` with float32 rows of whole blocks, so every op has one meaning
for both.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.layouts.pool import Component, gather


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Pages:
    """One component of one layer in the pool: of one rank, or on the way there of all ranks."""

    pool: UInt8[Array, "*ranks P lines 128"]
    line: Int[Array, ""]
    component: Component = field(metadata={"static": True})
    compute: str = field(default="exact", metadata={"static": True})

    @property
    def block_size(self) -> int:
        """Z."""
        return self.component.tokens

    @property
    def num_heads(self) -> int:
        """K, or 1 for the index."""
        return self.component.heads

    def of_rank(self) -> "Pages":
        """The same where the pool is that of one rank alone."""
        return replace(self, pool=self.pool.reshape(self.pool.shape[1:]))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """Values as they are, a block a row; what packed training and scoring attend to."""

    values: Float[Array, "P Z heads width"]

    @property
    def block_size(self) -> int:
        """Z."""
        return self.values.shape[1]

    @property
    def num_heads(self) -> int:
        """K, or 1 for the index."""
        return self.values.shape[2]


Source = Pages | Blocks


def read(
    source: Source, block_ids: Int[Array, "*batch heads C"]
) -> Float[Array, "*batch heads C Z width"]:
    """float32 rows of whole blocks, each head's from its own ids; rows of id -1 are unspecified but
    finite in `Blocks`.
    """
    if isinstance(source, Pages):
        return gather(source.pool, source.component, source.line, block_ids, source.compute)
    values_PhZw = source.values.swapaxes(1, 2).astype(jnp.float32)
    heads = jnp.arange(block_ids.shape[-2])[:, None]
    return values_PhZw[jnp.maximum(block_ids, 0), heads]
