"""Checkpoint folder <-> model: leaf by leaf, straight into (sharded) device arrays."""

import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from configs.model import ModelConfig
from minimax_jax import names
from minimax_jax.checkpoint.files import CheckpointFiles, open_files, read_json
from minimax_jax.checkpoint.folder import (
    config_json,
    copy_companions,
    read_target_config,
    write_config,
)
from minimax_jax.checkpoint.plan import Plan, make_plan
from minimax_jax.checkpoint.read import GateUp, Loader, parts
from minimax_jax.checkpoint.tensor_file import CheckpointError, Entry
from minimax_jax.checkpoint.write import (
    MAX_SHARD_BYTES,
    Group,
    Kind,
    Progress,
    all_or_nothing,
    arrays,
    copied,
    specs,
    write_files,
)
from minimax_jax.model import Model
from minimax_jax.quantization_map import map_problems, sections
from minimax_jax.quantize import Weight, as_format, is_router
from sharding.rules import SERVE, Rules


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a load did. `nbytes` are those of the whole model, `read_bytes` what this process took
    from its files: what its own devices keep, and of narrow columns whole rows.

    `peak_host_bytes` is the most that our own host buffers held at once, counted where they are
    made: one shard of a leaf, or of one part of a quantised leaf, and a chunk of at most 16 MiB
    that is cast on its way. It is not what the process holds: on a CPU the device's arrays are host
    memory, and the system caches files as it likes.
    """

    tensors: int
    nbytes: int
    read_bytes: int
    largest_bytes: int
    peak_host_bytes: int
    seconds: float
    not_loaded: dict[str, int]  # tensors of each known part

    def __str__(self) -> str:
        rest = ", ".join(f"{count} {part}" for part, count in self.not_loaded.items())
        return (
            f"{self.tensors} tensors, {self.nbytes / 1e6:,.1f} MB in {self.seconds:.1f} s; "
            f"{self.read_bytes / 1e6:,.1f} MB read here, "
            f"host buffers at most {self.peak_host_bytes / 1e6:,.1f} MB, "
            f"largest buffer {self.largest_bytes / 1e6:,.1f} MB"
            + (f"; not loaded: {rest} tensors" if rest else "")
        )


def load_model(
    folder: Path | str,
    *,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
    rules: Rules = SERVE,
    progress: Progress | None = None,
    gate_up: GateUp = "contiguous",
) -> tuple[Model, LoadReport]:
    """A model with the weights of a folder: BF16, MXFP8, M3.1-Flash, ModelOpt NVFP4, or what
    transformers saved. A drafter's folder in it is not looked at.

    Quantised tensors stay quantised, in the order of bytes that this device's kernels read; plain
    ones become `dtype`, the router float32. On a mesh each
    device gets its shard of every leaf by `rules` and nothing else. `progress` is called with each
    leaf's path and bytes. `gate_up` says how a *fused* gate_up_proj has its rows, which no file
    tells: gate rows first (transformers), or "interleaved".

    Raises CheckpointError with everything that is wrong, before any parameter is made; a NaN among
    the scales is found on the way. Cache scales (k_scale, v_scale) default to 1.0, the outer scale
    of our page pool: where they are stored they have to be 1.0, which one warning tells.
    """
    folder = Path(folder)
    model = abstract_model(read_target_config(folder), dtype)
    model.rules = rules
    loader = Loader(mesh=mesh, rules=rules, gate_up=gate_up)
    plan = read_plan(folder, model)
    check_shardings(folder, plan, parameters_of(model), loader)
    _warn_of_cache_scales(plan)
    return model, fill(parameters_of(model), plan, loader, dtype, progress)


def fill(
    parameters: dict[str, nnx.Param],
    plan: Plan,
    loader: Loader,
    dtype: DTypeLike,
    progress: Progress | None = None,
) -> LoadReport:
    """Sets each parameter to its leaf's values; plain ones become `dtype`, the router float32."""
    start, nbytes = time.monotonic(), 0
    for leaf in plan.leaves:
        parameter = parameters[leaf.path]
        plain = jnp.float32 if is_router(leaf.path) else dtype
        weight = loader.leaf(leaf, parameter.axes, plain)
        parameter.set_value(weight)
        nbytes += weight.nbytes
        if progress is not None:
            progress(leaf.path, weight.nbytes)
    return LoadReport(
        tensors=len({e.name for leaf in plan.leaves for s in leaf.tensors for e in s.parts}),
        nbytes=nbytes,
        read_bytes=loader.read_bytes,
        largest_bytes=loader.largest,
        peak_host_bytes=loader.peak,
        seconds=time.monotonic() - start,
        not_loaded=_counts(plan),
    )


def abstract_model(config: ModelConfig, dtype: DTypeLike) -> Model:
    """The model without values: its parameters are shapes."""
    return jax.eval_shape(lambda: Model(config, nnx.Rngs(0), dtype))


def parameters_of(model: nnx.Module) -> dict[str, nnx.Param]:
    """The model's parameters by path, in order."""
    return {
        ".".join(str(key) for key in path): node
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Param)
    }


def read_plan(folder: Path, model: Model) -> Plan:
    """Where a folder has each parameter; CheckpointError with everything that is wrong."""
    plan = _plan(open_files(folder), model)
    if plan.problems:
        raise CheckpointError(folder, plan.problems)
    return plan


def find_problems(files: CheckpointFiles, model: Model) -> list[str]:
    """Everything that keeps these files from being loaded into a model, from their headers."""
    return _plan(files, model).problems


def _plan(files: CheckpointFiles, model: Model) -> Plan:
    shapes = {path: tuple(p.get_value().shape) for path, p in parameters_of(model).items()}
    plan = make_plan(files, shapes)
    for section in sections(files.folder):
        plan.problems += map_problems(section, plan.leaves)
    return plan


def check_shardings(
    folder: Path, plan: Plan, parameters: dict[str, nnx.Param], loader: Loader
) -> None:
    """Refuses shards that would cut a quantised group or leave a remainder (F91), all together."""
    problems = []
    for leaf in plan.leaves:
        for part in parts(leaf, jnp.float32):
            try:
                loader.sharding(part.shape, parameters[leaf.path].axes)
            except ValueError as error:
                problems.append(f"{leaf.path} in {leaf.form} cannot be sharded: {error}")
    if problems:
        raise CheckpointError(folder, problems)


def _warn_of_cache_scales(plan: Plan) -> None:
    """One warning for all layers (F08); scales other than 1 were refused by the plan."""
    count = _counts(plan).get("cache scale", 0)
    if count:
        warnings.warn(
            f"{count} k_scale and v_scale tensors are not used: the cache's outer scale is 1.0, "
            "which they all are",
            stacklevel=3,
        )


def _counts(plan: Plan) -> dict[str, int]:
    return dict(Counter(str(names.known_part(entry.name)) for entry in plan.known))


def save_model(
    model: Model,
    folder: Path | str,
    *,
    format: str | None = None,
    source: Path | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Writes a checkpoint in the released files' names; the folder appears when it is complete.

    Without a `format` every weight is written as it is in memory, bit for bit (float32 as F32). In
    "m3.1", "mxfp8" or "bf16" the weights that the format quantises are quantised, weights in that
    form already keep their bits, and all else becomes BF16, float32 weights of a training run
    included; the router stays F32. `source` is the folder that the model came from: its config is
    kept where we have nothing to say, and its vision, MTP and drafter tensors, scales of
    activations and caches, tokenizer, template and `dspark/` come along byte for byte.

    Raises ValueError for an unknown format or a folder that is not empty, CheckpointError for a
    source that cannot be read.
    """
    chosen = None if format is None else as_format(format)
    weights = {path: p.get_value() for path, p in parameters_of(model).items()}
    kinds = {path: Kind.of(w).wanted(path, chosen) for path, w in weights.items()}
    groups = [g for path, weight in weights.items() for g in _groups(path, weight, kinds[path])]
    config = None
    if source is not None:
        source = Path(source)
        groups += [copied(entry) for entry in known_entries(source)]
        config = read_json(source / "config.json")
    with all_or_nothing(Path(folder)) as new:
        write_files(new, groups, max_shard_bytes, progress)
        write_config(new, config_json(model.config, kinds, config))
        if source is not None:
            copy_companions(source, new)


def known_entries(folder: Path) -> list[Entry]:
    """The tensors of a folder that are known but not loaded; CheckpointError if it is damaged."""
    files = open_files(folder)
    if files.problems:
        raise CheckpointError(folder, files.problems)
    return [entry for name, entry in files.entries.items() if names.known_part(name)]


def _groups(path: str, weight: Weight, kind: Kind) -> Iterator[Group]:
    """A parameter's tensors, those of each expert apart."""
    place, shape = names.released_place(path), tuple(weight.shape)
    if place.layout != "per expert":
        tensors = specs(names.add_prefix(place.name), shape, kind)
        yield Group(specs=tensors, produce=partial(arrays, weight, kind))
        return
    for e, name in enumerate(place.names(shape[0])):
        tensors = specs(names.add_prefix(name), shape[1:], kind)
        yield Group(specs=tensors, produce=partial(_expert_arrays, weight, e, kind))


def _expert_arrays(weight: Weight, expert: int, kind: Kind) -> list[np.ndarray]:
    return arrays(jax.tree.map(lambda part: part[expert], weight), kind)
