"""Meshes of a ParallelConfig."""

import jax
import pytest
from jax.sharding import AxisType

from configs.parallel import ParallelConfig
from sharding import make_mesh

pytestmark = pytest.mark.devices(8)


@pytest.mark.parametrize(
    ("text", "shape"),
    [("tp1", (1, 1)), ("tp4,sp", (1, 4)), ("dep4", (4, 1)), ("dp2,tp4,dcp2", (2, 4))],
)
def test_mesh_is_dp_by_tp_with_auto_axes(text, shape):
    mesh = make_mesh(ParallelConfig.parse(text))
    assert mesh.axis_names == ("data", "model")
    assert mesh.devices.shape == shape
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)


def test_mesh_takes_the_given_devices():
    devices = jax.devices()[4:7]
    mesh = make_mesh(ParallelConfig(tp=2), devices)
    assert set(mesh.devices.flat) == set(devices[:2])


def test_too_few_devices_are_refused():
    with pytest.raises(ValueError, match="^dp2,tp8 needs 16 devices, but there are 8$"):
        make_mesh(ParallelConfig(dp=2, tp=8))
