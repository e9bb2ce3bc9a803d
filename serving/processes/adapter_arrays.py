"""Adapters as bytes: numpy's own archive of their matrices, and their places as JSON in it."""

import json
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minimax_jax.lora import Adapter, LowRank
from serving.device.adapters import linears


def encoded(adapters: Mapping[str, Adapter]) -> bytes:
    """Adapters by name, in float32."""
    arrays: dict[str, np.ndarray] = {}
    places = []
    for name, adapter in adapters.items():
        for path, part in linears(adapter):
            index = len(places)
            places.append([name, *path])
            for key, value in (("a", part.a), ("b", part.b), ("scale", part.scale)):
                arrays[f"{key}{index}"] = np.asarray(jax.device_get(value), np.float32)
    said = json.dumps({"names": list(adapters), "places": places}).encode()
    stream = BytesIO()
    np.savez(stream, said=np.frombuffer(said, np.uint8), **arrays)  # type: ignore[arg-type]
    return stream.getvalue()


def decoded(body: memoryview) -> dict[str, Adapter]:
    """The same again."""
    with np.load(BytesIO(body)) as arrays:
        said = json.loads(arrays["said"].tobytes())
        adapters: dict[str, Any] = {name: {} for name in said["names"]}
        for index, (name, *path) in enumerate(said["places"]):
            branch = adapters[name]
            for step in path[:-1]:
                branch = branch.setdefault(step, {})
            branch[path[-1]] = LowRank(
                a=jnp.asarray(arrays[f"a{index}"]),
                b=jnp.asarray(arrays[f"b{index}"]),
                scale=float(arrays[f"scale{index}"]),
            )
    return adapters
