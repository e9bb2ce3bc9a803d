"""Settings that must stand before JAX starts a backend: eight CPU devices and a compilation cache.

Tests run on the CPU unless `JAX_PLATFORMS` says otherwise (`JAX_PLATFORMS=cuda,cpu` for the
tests marked `gpu`).
"""

import os
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import pytest

# Two workers share the cache; JAX locks its files only when a size limit is set.
CACHE_DIRECTORY = Path(__file__).parent.parent / ".cache" / "jax-tests"
CACHE_BYTES = 2 * 1024**3
# Every compiled program maps memory; at 65,530 maps Linux gives no more, and XLA crashes.
MAPS, MOST_MAPS = Path("/proc/self/maps"), 30_000


def pytest_configure():
    jax.config.update("jax_compilation_cache_dir", str(CACHE_DIRECTORY))
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def pytest_runtest_setup(item: pytest.Item):
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")
    devices = item.get_closest_marker("devices")
    if devices and jax.device_count() < devices.args[0]:
        pytest.skip(f"needs {devices.args[0]} devices")


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None):
    """Between two files, since the list of maps is long to read."""
    is_last = nextitem is None or nextitem.path != item.path
    if is_last and MAPS.exists() and MAPS.read_text("utf-8").count("\n") > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch):
    """Dispatch sees a Hopper GPU; nothing can be run on it."""
    from pallas_kernels import dispatch  # not before its annotations are checked

    device = SimpleNamespace(compute_capability=dispatch.HOPPER)
    seen = SimpleNamespace(devices=lambda: [device], default_backend=lambda: "gpu")
    monkeypatch.setattr(dispatch, "jax", seen)
    yield
    jax.clear_caches()  # what was traced for another device
