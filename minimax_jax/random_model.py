"""A model of random weights, made on the devices in its stored formats: what full-width code is
measured and checked with where there is no checkpoint.

A quantised weight is made of random bits in its own format, never of plain values, and a stack of
experts one after the other, so that the memory of the whole model is the memory of its weights. All
matrices [out, in] have a root mean square of about 1 / sqrt(in), norms are the identity.
"""

import math
import zlib
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Key

from configs.model import ModelConfig
from minimax_jax.checkpoint import parameters_of
from minimax_jax.drafter import Drafter
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
M = TypeVar("M", bound=nnx.Module)  # the target, or its drafter


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The logical axes of a weight's values on a mesh."""

    axes: Axes
    mesh: Mesh
    rules: Rules

    def sharding(self, part: Any) -> NamedSharding:
        """Of one of a weight's arrays. ValueError where the mesh would cut it unevenly."""
        whole = (*self.axes, None, None)  # of pages, a page's own lines and bytes
        return named_sharding(self.mesh, whole[: part.ndim], self.rules, part.shape)


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What is made of a weight: its values' shape, how they are stored, and where they lie."""

    shape: tuple[int, ...]
    form: Literal["plain", "mxfp8", "nvfp4", "pages"]
    dtype: Any
    place: _Place | None


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

    Every device makes all of a weight and keeps its shard by the `rules`; of a stack of experts it
    makes one at a time. So no device ever holds more than its shards, one whole stack as it is
    stored and the numbers of one matrix.
    """
    shapes = jax.eval_shape(lambda: quantize_model(Model(config, nnx.Rngs(0), dtype), format))
    model = _filled(shapes, dtype, seed, mesh, rules)
    model.rules = rules
    return model


def random_drafter(
    config: ModelConfig,
    dtype: DTypeLike,
    format: str = "m3.1",
    *,
    seed: int = 0,
    mesh: Mesh | None = None,
) -> Drafter:
    """The drafter of such a model; ValueError if the config has none."""
    shapes = jax.eval_shape(lambda: quantize_model(Drafter(config, nnx.Rngs(0)), format))
    return _filled(shapes, dtype, seed, mesh, SERVE)


def is_quantised(node: Any) -> bool:
    """Whether a node of a model's tree is one weight of several arrays."""
    return form_of(node) != "plain"


def _filled(shapes: M, dtype: DTypeLike, seed: int, mesh: Mesh | None, rules: Rules) -> M:
    axes = {path: one.axes for path, one in parameters_of(shapes).items()}
    root = jax.random.key(seed, impl="unsafe_rbg")
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=is_quantised)
    weights = []
    for keys, leaf in leaves:
        path = path_of_leaf(keys)
        place = None if mesh is None else _Place(axes=axes[path], mesh=mesh, rules=rules)
        key = jax.random.fold_in(root, zlib.crc32(path.encode()))
        weight = _made(key, _kind(path, leaf, jnp.dtype(dtype), place))
        weights.append(weight if mesh is None else jax.block_until_ready(weight))
    return jax.tree.unflatten(tree, weights)


def _kind(path: str, leaf: Any, plain: Any, place: _Place | None) -> _Kind:
    form = "pages" if has_kernel_order(path, leaf) else form_of(leaf)
    dtype = jnp.dtype(jnp.float32) if is_router(path) else plain
    return _Kind(shape=tuple(leaf.shape), form=form, dtype=dtype, place=place)


@partial(jax.jit, static_argnums=1)
def _made(key: Key[Array, ""], kind: _Kind) -> Any:
    weight, place = _stack(key, kind.shape, kind), kind.place
    if place is None:
        return weight
    shardings = jax.tree.map(place.sharding, weight)
    return jax.tree.map(jax.lax.with_sharding_constraint, weight, shardings)


def _stack(key: Key[Array, ""], shape: tuple[int, ...], kind: _Kind) -> Any:
    """One matrix after the other, each from a key of its own."""
    if len(shape) < 3:
        return _FORMS[kind.form](key, shape, kind.dtype)

    def one(index: Array) -> Any:
        return _stack(jax.random.fold_in(key, index), shape[1:], kind)

    return jax.lax.map(one, jnp.arange(shape[0]))


def _plain(key: Key[Array, ""], shape: tuple[int, ...], dtype: Any) -> Array:
    if len(shape) < 2:  # a norm's weight, which is stored around 0, or the router's bias
        return jnp.zeros(shape, dtype)
    return (jax.random.normal(key, shape) * shape[-1] ** -0.5).astype(dtype)


def _mxfp8(key: Key[Array, ""], shape: tuple[int, ...], dtype: Any) -> MXFP8Tensor:
    bits = (jax.random.bits(key, shape, jnp.uint8) & 0x9F) | 0x20
    power = 127 - round(math.log2(shape[-1] ** 0.5 * _E4M3_RMS))
    groups = (*shape[:-1], shape[-1] // mxfp8.GROUP)
    codes = jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)
    return MXFP8Tensor(codes, jnp.full(groups, power, jnp.uint8))


def _nvfp4(key: Key[Array, ""], shape: tuple[int, ...], dtype: Any) -> NVFP4Tensor:
    """With an outer scale that divides, as checkpoints have it."""
    of_codes, of_scales = jax.random.split(key)
    codes = jax.random.bits(of_codes, (*shape[:-1], shape[-1] // 2), jnp.uint8)
    groups = (*shape[:-1], shape[-1] // nvfp4.GROUP)
    scales = 0x38 | (jax.random.bits(of_scales, groups, jnp.uint8) & 7)
    outer = jnp.full(shape[:-2], shape[-1] ** 0.5 * _NVFP4_RMS, jnp.float32)
    return NVFP4Tensor(
        codes, jax.lax.bitcast_convert_type(scales, jnp.float8_e4m3fn), outer, divides=True
    )


def _pages(key: Key[Array, ""], shape: tuple[int, ...], dtype: Any) -> Any:
    return to_pages(_nvfp4(key, shape, dtype))


_FORMS = {"plain": _plain, "mxfp8": _mxfp8, "nvfp4": _nvfp4, "pages": _pages}
