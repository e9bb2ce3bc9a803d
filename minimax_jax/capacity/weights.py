"""Bytes of weights, in the whole model and on one GPU, part by part.

Shapes and logical axes are those of the model's own parameters, traced without values, one layer of
each kind; their stored formats are what a checkpoint is written in; who holds what is decided by
the serving rules on a mesh without devices. All GPUs hold the same number of bytes.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh

from configs.model import ModelConfig
from configs.parallel import ParallelConfig
from configs.parts import DrafterConfig, QuantizationConfig
from minimax_jax import names
from minimax_jax.checkpoint import abstract_model, parameters_of
from minimax_jax.checkpoint.tensor_file import DTYPES
from minimax_jax.checkpoint.write import Kind, specs
from minimax_jax.inspect import part_of
from minimax_jax.quantize import Form, Format, form_in, is_expert, is_projection, is_router
from minimax_jax.speculative.checkpoint import abstract_drafter
from sharding.apply import named_sharding
from sharding.axes import MESH_AXES, Axes
from sharding.rules import SERVE, with_parallel

DRAFTER = "drafter"


@dataclass(frozen=True, kw_only=True)
class WeightPart:
    """Some of the weights: bytes in the whole model, and on each GPU."""

    part: str
    total_bytes: int
    gpu_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Leaf:
    """A parameter that occurs `count` times."""

    path: str
    shape: tuple[int, ...]
    axes: Axes
    count: int


@cache
def weight_parts(
    config: ModelConfig, parallel: ParallelConfig, weights: Format | None = None
) -> tuple[WeightPart, ...]:
    """The parts of the text model, largest first, then its drafter as one.

    `weights` is a format of `minimax_jax.quantize`; None is what the config's quantisation names.
    Raises ValueError for a parallelism that does not divide the weights.
    """
    totals, on_gpu = Counter(), Counter()
    for leaf in _leaves(config):
        part = DRAFTER if leaf.path.startswith(names.DRAFTER) else part_of(leaf.path)
        for nbytes, shard_bytes in _arrays(leaf, _form(leaf.path, config, weights), parallel):
            totals[part] += leaf.count * nbytes
            on_gpu[part] += leaf.count * shard_bytes
    order = sorted(totals, key=lambda part: (part == DRAFTER, -totals[part]))
    return tuple(WeightPart(part=p, total_bytes=totals[p], gpu_bytes=on_gpu[p]) for p in order)


def _leaves(config: ModelConfig) -> Iterator[_Leaf]:
    plain = replace(config, quantization=QuantizationConfig(), drafter=None)
    yield from _target_leaves(plain)
    if config.drafter is not None:
        yield from _drafter_leaves(plain, replace(config.drafter, projections="bf16"))


@cache
def _target_leaves(config: ModelConfig) -> tuple[_Leaf, ...]:
    """The target's parameters; a layer of each kind stands for all of its kind."""
    kinds = Counter(zip(config.sparse_layers, config.moe_layers, strict=True))
    sparse, moe = zip(*kinds, strict=True)
    model = abstract_model(replace(config, sparse_layers=sparse, moe_layers=moe), jnp.bfloat16)
    return tuple(_counted(model, "", list(kinds.values())))


@cache
def _drafter_leaves(config: ModelConfig, drafter: DrafterConfig) -> tuple[_Leaf, ...]:
    """The drafter's parameters; its layers are all of one kind."""
    model = abstract_drafter(replace(config, drafter=replace(drafter, num_layers=1)))
    return tuple(_counted(model, names.DRAFTER, [drafter.num_layers]))


def _counted(model: nnx.Module, prefix: str, layers: list[int]) -> Iterator[_Leaf]:
    for path, parameter in parameters_of(model).items():
        layer = names.path_layer(path)
        yield _Leaf(
            path=prefix + path,
            shape=tuple(parameter.get_value().shape),
            axes=tuple(parameter.axes),
            count=1 if layer is None else layers[layer],
        )


def _form(path: str, config: ModelConfig, weights: Format | None) -> Form:
    if weights is not None:
        return form_in(path, weights)
    stored, projections = config.quantization, config.quantization.projections
    if config.drafter is not None and path.startswith(names.DRAFTER):
        projections = config.drafter.projections
    named = stored.experts if is_expert(path) else projections if is_projection(path) else "bf16"
    return "plain" if named == "bf16" else named


def _arrays(leaf: _Leaf, form: Form, parallel: ParallelConfig) -> Iterator[tuple[int, int]]:
    """Bytes of each array that a parameter is stored in, whole and on one GPU."""
    mesh = AbstractMesh((parallel.dp, parallel.tp), MESH_AXES)
    rules = with_parallel(SERVE, parallel)
    kind = Kind(form=form, dtype=DTYPES["F32" if is_router(leaf.path) else "BF16"])
    outer = 1 if is_expert(leaf.path) else 0  # a stack of matrices, or one
    experts, matrix = leaf.shape[:outer], leaf.shape[outer:]
    for spec in specs(leaf.path, matrix, kind):
        one_number = len(spec.shape) < len(matrix)  # NVFP4's outer scale: in memory one a matrix
        shape = experts if one_number else (*experts, *spec.shape)
        sharding = named_sharding(mesh, leaf.axes[: len(shape)], rules, shape)
        size = spec.dtype.itemsize
        yield math.prod(shape) * size, math.prod(sharding.shard_shape(shape)) * size
