"""What a layout costs before it runs: each collective's bytes, memory and work of one rank.

Bytes are read from the partitioned program itself (`program`, `hlo`), and which work depends on
none of a collective's (`graph`); memory from the parameters'
shapes and shardings and from the page layout, operations from shapes (`flops`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jax.sharding import AbstractMesh

from minimax_jax.capacity.weights import WeightPart, weight_parts
from minimax_jax.expert_exchange import copies_sent
from minimax_jax.model import MICRO_BATCH
from minimax_jax.plan.flops import layer_flops
from minimax_jax.plan.graph import all_work, work_beside
from minimax_jax.plan.hlo import RAGGED, Collective, collectives
from minimax_jax.plan.program import Step, layout_of, partitioned
from sharding.axes import MESH_AXES
from sharding.ragged import RAGGED_SCOPE

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
    is_expected: bool  # of a ragged exchange, with tokens spread evenly over the experts
    work_beside: float  # products that may run meanwhile, of a layer's; in the best placed layer


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
    text = partitioned(step)
    of_layer = all_work(text) / step.layers
    beside = [flops / of_layer for flops in work_beside(text)]
    found = list(zip(_expected(collectives(text), step), beside, strict=True))
    config, parallel = step.config, step.parallel
    mesh = AbstractMesh((parallel.dp, parallel.tp), MESH_AXES)
    layout = layout_of(config, mesh, parallel.page_ranks)
    return Plan(
        step=step,
        in_layer=_grouped((c for c in found if _LAYER in c[0].scope), step, step.layers),
        once=_grouped((c for c in found if _LAYER not in c[0].scope), step, 1),
        weights=weight_parts(config, parallel, step.weights),
        page_bytes_per_token=layout.block_bytes / layout.block_size / parallel.page_ranks,
        flops=layer_flops(step),
    )


def _expected(found: list[Collective], step: Step) -> list[Collective]:
    """The same, ragged exchanges with what they send at an even load: a CPU gathers in their place.
    With two micro-batches each sends a half.
    """
    parallel, moe = step.parallel, step.config.moe
    own = moe.num_experts // parallel.num_devices
    copies = copies_sent(moe.num_experts, own, moe.experts_per_token, parallel.dp)
    halves = 1 + any(f"{MICRO_BATCH}1" in one.scope for one in found)
    rows = step.tokens_of_rank * copies / halves
    return [
        replace(one, kind=RAGGED, nbytes=rows * one.row_bytes) if RAGGED_SCOPE in one.scope else one
        for one in found
    ]


def _grouped(
    found: Iterable[tuple[Collective, float]], step: Step, layers: int
) -> tuple[Sent, ...]:
    """One entry a place and kind, in the order of their first appearance. The layers of one kind
    share a scope, and the first and the last have less beside them than those between.
    """
    groups: dict[tuple, list[tuple[Collective, float]]] = {}
    for one, beside in found:
        key = (one.kind, _place(one.scope), one.dtype, one.ranks)
        groups.setdefault(key, []).append((one, beside))
    return tuple(
        Sent(
            kind=key[0],
            place=key[1],
            dtype=key[2],
            ranks=key[3],
            count=len(group) / layers,
            bytes_per_token=sum(c.nbytes for c, _ in group) / layers / step.tokens_of_rank,
            is_expected=key[0] == RAGGED,
            work_beside=min(_most_of_each_scope(group).values()),
        )
        for key, group in groups.items()
    )


def _most_of_each_scope(group: list[tuple[Collective, float]]) -> dict[str, float]:
    most: dict[str, float] = {}
    for one, beside in group:
        most[one.scope] = max(beside, most.get(one.scope, 0.0))
    return most


def _place(scope: str) -> str:
    """The named scopes of a path, or its last part: attention/of_heads."""
    parts = [
        part
        for part in scope.split("/")
        if "(" not in part and part not in _STRUCTURE and not part.startswith(MICRO_BATCH)
    ]
    return "/".join(parts[:-1]) or parts[-1]
