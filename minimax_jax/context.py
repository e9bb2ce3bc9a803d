"""What all layers of a step share."""

from dataclasses import dataclass, field

import jax
from jaxtyping import Array, Float, UInt8

from configs.model import ModelConfig
from minimax_jax.batch import Batch
from minimax_jax.rope import rope_angles
from pallas_kernels.layouts.pool import PoolLayout
from sharding.rules import SERVE, Rules


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Context:
    """What all layers of one step share: the batch, its angles, how the cache stores, where arrays
    lie on the mesh, and whether another micro-batch's layers come between.

    `record`, of a batch without a cache, is the pages of another run: block b is tile b.
    """

    batch: Batch
    cos: Float[Array, "B T r"]
    sin: Float[Array, "B T r"]
    record: UInt8[Array, "P lines 128"] | None = None
    layout: PoolLayout = field(metadata={"static": True})
    rules: Rules = field(default=SERVE, metadata={"static": True})
    alternates: bool = field(default=False, metadata={"static": True})

    @classmethod
    def of(
        cls,
        batch: Batch,
        config: ModelConfig,
        layout: PoolLayout,
        rules: Rules = SERVE,
        *,
        alternates: bool = False,
        record: UInt8[Array, "P lines 128"] | None = None,
    ) -> "Context":
        """The context of a batch."""
        cos, sin = rope_angles(batch.positions, config.attention)
        lies = {"layout": layout, "rules": rules, "alternates": alternates}
        return cls(batch=batch, cos=cos, sin=sin, record=record, **lies)
