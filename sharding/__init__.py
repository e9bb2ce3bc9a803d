"""Which device holds what, by name: meshes, rules tables, the doors to the compiler's sharding."""

from sharding.apply import constrain, local, named_sharding, spec, splits
from sharding.mesh import make_mesh
from sharding.rules import SERVE, TRAIN, Rules, with_parallel

__all__ = [
    "SERVE",
    "TRAIN",
    "Rules",
    "constrain",
    "local",
    "make_mesh",
    "named_sharding",
    "spec",
    "splits",
    "with_parallel",
]
