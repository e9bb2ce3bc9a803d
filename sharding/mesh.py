"""The device mesh of a ParallelConfig: axes `data` (dp) and `model` (tp), always there, of one
device if need be.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from configs.parallel import ParallelConfig
from sharding.axes import MESH_AXES


def make_mesh(parallel: ParallelConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A dp x tp mesh over the first devices, by default of `jax.devices()`.

    Its axes are Auto: the compiler completes the sharding that `constrain` states in places.
    Raises ValueError when there are too few devices.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < parallel.num_devices:
        raise ValueError(
            f"{parallel} needs {parallel.num_devices} devices, but there are {len(devices)}"
        )
    return jax.make_mesh(
        (parallel.dp, parallel.tp),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
        devices=devices[: parallel.num_devices],
    )


def is_partitioned() -> bool:
    """Whether the compiler spreads what is traced here over several devices: not where the current
    mesh has one, nor within `local`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return not (mesh.empty or mesh.size == 1 or mesh.manual_axes)
