"""What all layers of a step share."""

from dataclasses import dataclass, field

import jax
from jaxtyping import Array, Float

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
    """

    batch: Batch
    cos: Float[Array, "B T r"]
    sin: Float[Array, "B T r"]
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
    ) -> "Context":
        """The context of a batch."""
        cos, sin = rope_angles(batch.positions, config.attention)
        return cls(batch=batch, cos=cos, sin=sin, layout=layout, rules=rules, alternates=alternates)
