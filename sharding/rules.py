"""Where each logical axis lands on the mesh: one table per situation.

`SERVE` is for parameters in serving and for activations everywhere; `TRAIN` is for parameters and
optimiser state in training, which are sharded over `data` as well. `with_parallel` adds what
expert and sequence parallelism change.
"""

from dataclasses import dataclass, replace

from configs.parallel import ParallelConfig, Transport
from sharding.axes import DATA, LOGICAL_AXES, MODEL, Axes

MeshAxes = str | tuple[str, ...] | None

# Axes that are replicated when the mesh does not divide them; for all others that is an error.
REPLICATED_IF_UNEVEN = frozenset(
    {
        "batch",  # a lone prompt runs on a data-parallel mesh, too
        "tokens",  # one token a sequence is decoded on every rank
        "kv_heads",  # more tensor-parallel ranks than key heads share copies of the heads
        "index_heads",  # as many as key heads, and each goes with its own
    }
)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """A field per logical axis of `sharding.axes`: the mesh axis, or axes, it is split over; and
    how activations travel where they change from one to another, how many neighbouring ranks split
    the scoring of a context, or share out its pages, and whether a prefill chunk runs as two
    alternating halves.
    """

    batch: MeshAxes = DATA
    tokens: MeshAxes = None
    embed: MeshAxes = None
    heads: MeshAxes = MODEL
    attended: MeshAxes = MODEL
    kv_heads: MeshAxes = MODEL
    head_dim: MeshAxes = None
    index_heads: MeshAxes = MODEL
    mlp: MeshAxes = MODEL
    experts: MeshAxes = None
    expert_mlp: MeshAxes = MODEL
    vocab: MeshAxes = MODEL
    layers: MeshAxes = None
    ranks: MeshAxes = (DATA, MODEL)
    partials: MeshAxes = MODEL
    transport: Transport = "exact"
    index_ranks: int = 1
    page_ranks: int = 1
    overlap: bool = False


SERVE = Rules()
TRAIN = replace(SERVE, embed=DATA)


def with_parallel(rules: Rules, parallel: ParallelConfig) -> Rules:
    """The table under expert parallelism (whole experts a device) and sequence parallelism (tokens
    split between the regions that split heads and hidden widths, and the output projection of
    attention whole, since each rank runs it on its own tokens).
    """
    if parallel.ep > 1:
        rules = replace(rules, experts=(DATA, MODEL), expert_mlp=None)
    if parallel.sp:
        rules = replace(rules, tokens=MODEL, attended=None, transport=parallel.transport)
    pages = parallel.page_ranks  # a rank that has some of them scores those
    rules = replace(rules, index_ranks=1 if parallel.split else parallel.dcp, page_ranks=pages)
    return replace(rules, overlap=parallel.overlap)


def mesh_axes(axes: Axes, rules: Rules) -> tuple[MeshAxes, ...]:
    """The mesh axes of each dimension of an array.

    Raises ValueError for an unknown name, or when two dimensions land on the same mesh axis.
    """
    known = {axis: getattr(rules, axis) for axis in LOGICAL_AXES}
    owners: dict[str, str] = {}
    for axis in axes:
        if axis is None:
            continue
        if axis not in known:
            raise ValueError(f"{axis!r} is no logical axis; there are {', '.join(known)}")
        for mesh_axis in as_tuple(known[axis]):
            if mesh_axis in owners:
                raise ValueError(
                    f"axes {owners[mesh_axis]!r} and {axis!r} of one array {axes} both land on "
                    f"the mesh axis {mesh_axis!r}"
                )
            owners[mesh_axis] = axis
    return tuple(None if axis is None else known[axis] for axis in axes)


def as_tuple(mesh_axis: MeshAxes) -> tuple[str, ...]:
    """One mesh axis, several or none, as a tuple."""
    if mesh_axis is None:
        return ()
    return (mesh_axis,) if isinstance(mesh_axis, str) else mesh_axis
