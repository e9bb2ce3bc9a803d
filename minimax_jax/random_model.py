"""A model of random weights, made on the device in its stored formats: what full-width code is
measured and checked with where there is no checkpoint.

A quantised weight is made of random bits in its own format, never of plain values, so that the
memory of the whole model is the memory of its weights. All matrices [out, in] have a root mean
square of about 1 / sqrt(in), norms are the identity.
"""

import math
import zlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Key

from configs.model import ModelConfig
from minimax_jax.checkpoint import parameters_of
from minimax_jax.model import Model
from minimax_jax.quantize import (
    form_of,
    has_kernel_order,
    is_router,
    path_of_leaf,
    quantize_model,
)
from pallas_kernels.layouts import mxfp8, nvfp4
from pallas_kernels.layouts.mxfp8 import MXFP8Tensor
from pallas_kernels.layouts.nvfp4 import NVFP4Tensor
from pallas_kernels.layouts.nvfp4_pages import to_pages
from sharding.apply import named_sharding
from sharding.axes import Axes
from sharding.rules import SERVE, Rules

# Root mean squares of random bits, masked as below: E4M3 with exponents 4 to 7, E2M1 times a scale
# of 1 to 15/8.
_E4M3_RMS, _NVFP4_RMS = 0.845, 4.29
_as_pages = jax.jit(to_pages)


def random_model(
    config: ModelConfig,
    dtype: DTypeLike,
    format: str = "m3.1",
    *,
    seed: int = 0,
    mesh: Mesh | None = None,
    rules: Rules = SERVE,
) -> Model:
    """A model in a format of `quantize`, plain weights of `dtype`, the router float32. The same
    seed gives the same values, whatever the number of layers and the mesh.

    A weight is made on one device and then lies on the `mesh` by the `rules`, so that no device
    ever holds more than its shards and one whole weight.
    """
    shapes = jax.eval_shape(lambda: quantize_model(Model(config, nnx.Rngs(0), dtype), format))
    axes = {path: one.axes for path, one in parameters_of(shapes).items()}
    root = jax.random.key(seed, impl="unsafe_rbg")

    def make(keys: tuple[Any, ...], leaf: Any) -> Any:
        weight = _weight(keys, leaf, root=root, plain=jnp.dtype(dtype))
        return weight if mesh is None else placed(weight, axes[path_of_leaf(keys)], mesh, rules)

    model = jax.tree_util.tree_map_with_path(make, shapes, is_leaf=is_quantised)
    model.rules = rules
    return model


def placed(weight: Any, axes: Axes, mesh: Mesh, rules: Rules) -> Any:
    """A weight's arrays by shards. ValueError where the mesh would cut one unevenly."""
    whole = (*axes, None, None)  # of pages, a page's own lines and bytes

    def moved(part: Array) -> Array:
        return jax.device_put(part, named_sharding(mesh, whole[: part.ndim], rules, part.shape))

    return jax.block_until_ready(jax.tree.map(moved, weight))


def is_quantised(node: Any) -> bool:
    """Whether a node of a model's tree is one weight of several arrays."""
    return form_of(node) != "plain"


def _weight(keys: tuple[Any, ...], leaf: Any, *, root: Key[Array, ""], plain: Any) -> Any:
    path = path_of_leaf(keys)
    key = jax.random.fold_in(root, zlib.crc32(path.encode()))
    weight = _random(leaf, key, jnp.dtype(jnp.float32) if is_router(path) else plain)
    return _as_pages(weight) if has_kernel_order(path, weight) else weight


def _random(leaf: Any, key: Key[Array, ""], dtype: Any) -> Any:
    if isinstance(leaf, MXFP8Tensor):
        return _mxfp8(key, leaf.shape)
    if isinstance(leaf, NVFP4Tensor):
        return _nvfp4(key, leaf.shape)
    if len(leaf.shape) < 2:  # a norm's weight, which is stored around 0, or the router's bias
        return jnp.zeros(leaf.shape, dtype)
    return _plain(key, leaf.shape, dtype)


@partial(jax.jit, static_argnums=(1, 2))
def _plain(key: Key[Array, ""], shape: tuple[int, ...], dtype: Any) -> Array:
    return (jax.random.normal(key, shape) * shape[-1] ** -0.5).astype(dtype)


@partial(jax.jit, static_argnums=1)
def _mxfp8(key: Key[Array, ""], shape: tuple[int, ...]) -> MXFP8Tensor:
    bits = (jax.random.bits(key, shape, jnp.uint8) & 0x9F) | 0x20
    power = 127 - round(math.log2(shape[-1] ** 0.5 * _E4M3_RMS))
    groups = (*shape[:-1], shape[-1] // mxfp8.GROUP)
    codes = jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)
    return MXFP8Tensor(codes, jnp.full(groups, power, jnp.uint8))


@partial(jax.jit, static_argnums=1)
def _nvfp4(key: Key[Array, ""], shape: tuple[int, ...]) -> NVFP4Tensor:
    """With an outer scale that divides, as checkpoints have it."""
    of_codes, of_scales = jax.random.split(key)
    codes = jax.random.bits(of_codes, (*shape[:-1], shape[-1] // 2), jnp.uint8)
    groups = (*shape[:-1], shape[-1] // nvfp4.GROUP)
    scales = 0x38 | (jax.random.bits(of_scales, groups, jnp.uint8) & 7)
    outer = jnp.full(shape[:-2], shape[-1] ** 0.5 * _NVFP4_RMS, jnp.float32)
    return NVFP4Tensor(
        codes, jax.lax.bitcast_convert_type(scales, jnp.float8_e4m3fn), outer, divides=True
    )
