"""What a layout costs before it runs: each collective's bytes, memory and work of one rank.

Bytes are read from the partitioned program itself (`program`, `hlo`), memory from the parameters'
shapes and shardings and from the page layout, operations from shapes (`flops`).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from jax.sharding import AbstractMesh

from minimax_jax.capacity.weights import WeightPart, weight_parts
from minimax_jax.plan.flops import layer_flops
from minimax_jax.plan.hlo import Collective, collectives
from minimax_jax.plan.program import Step, layout_of, partitioned
from sharding.axes import MESH_AXES

_STRUCTURE = ("shard_map", "while", "body", "closed_call")  # parts of a path that name nothing
_LAYER = "jit(_run_layer)"  # in the scope of everything that a layer does


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A kind of collective at one place: what one rank sends, for each of its tokens."""

    kind: str
    place: str
    dtype: str
    ranks: int
    count: float  # a layer, or a step
    bytes_per_token: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `plan` finds. All figures are of one rank."""

    step: Step
    in_layer: tuple[Sent, ...]
    once: tuple[Sent, ...]  # a step: embedding, head, sampling
    weights: tuple[WeightPart, ...]  # of the whole model
    page_bytes_per_token: float
    flops: dict[str, float]  # of a layer and a token

    @property
    def bytes_per_token_layer(self) -> float:
        """What a layer's collectives send."""
        return sum(sent.bytes_per_token for sent in self.in_layer)

    @property
    def weight_bytes(self) -> int:
        """Of all weights."""
        return sum(part.gpu_bytes for part in self.weights)


def plan(step: Step) -> Plan:
    """Compiles a step for as many CPU devices as its mesh has. ValueError if there are fewer, or if
    the mesh does not divide the model.
    """
    found = collectives(partitioned(step))
    config, parallel = step.config, step.parallel
    layout = layout_of(config, AbstractMesh((parallel.dp, parallel.tp), MESH_AXES))
    return Plan(
        step=step,
        in_layer=_grouped((c for c in found if _LAYER in c.scope), step, step.layers),
        once=_grouped((c for c in found if _LAYER not in c.scope), step, 1),
        weights=weight_parts(config, parallel, step.weights),
        page_bytes_per_token=layout.block_bytes / layout.block_size,
        flops=layer_flops(step),
    )


def _grouped(found: Iterable[Collective], step: Step, layers: int) -> tuple[Sent, ...]:
    """One entry a place and kind, in the order of their first appearance."""
    nbytes: dict[tuple, float] = {}
    counts: Counter[tuple] = Counter()
    for one in found:
        key = (one.kind, _place(one.scope), one.dtype, one.ranks)
        nbytes[key] = nbytes.get(key, 0.0) + one.nbytes
        counts[key] += 1
    return tuple(
        Sent(
            kind=key[0],
            place=key[1],
            dtype=key[2],
            ranks=key[3],
            count=counts[key] / layers,
            bytes_per_token=nbytes[key] / layers / step.tokens_of_rank,
        )
        for key in nbytes
    )


def _place(scope: str) -> str:
    """The named scopes of a path, or its last part: attention/of_heads."""
    parts = [part for part in scope.split("/") if "(" not in part and part not in _STRUCTURE]
    return "/".join(parts[:-1]) or parts[-1]
