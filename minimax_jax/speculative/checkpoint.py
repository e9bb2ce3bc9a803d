"""The drafter's folder, `dspark/` in that of its target, read and written (spec/dspark 1.2).

Strict, as a wrong drafter still runs and only proposes nonsense: every tensor is known and there,
with its shape, and in the format that the folder's own quantisation config says. Embedding and head
are the target's and never stored here.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from configs.model import ModelConfig
from configs.parts import WeightFormat
from minimax_jax import names
from minimax_jax.checkpoint import LoadReport, check_shardings, fill, parameters_of
from minimax_jax.checkpoint.files import CheckpointFiles, open_files
from minimax_jax.checkpoint.folder import DRAFTER, write_config
from minimax_jax.checkpoint.plan import Plan, make_plan
from minimax_jax.checkpoint.read import Loader
from minimax_jax.checkpoint.tensor_file import CheckpointError
from minimax_jax.checkpoint.write import (
    Group,
    Kind,
    Progress,
    all_or_nothing,
    arrays,
    specs,
    write_files,
)
from minimax_jax.drafter import Drafter
from minimax_jax.quantization_map import map_problems, one_format_problems, sections
from minimax_jax.quantize import Form, Weight, as_format, is_projection
from sharding.rules import SERVE, Rules


def load_drafter(
    folder: Path | str,
    config: ModelConfig,
    *,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
    rules: Rules = SERVE,
    progress: Progress | None = None,
) -> tuple[Drafter, LoadReport]:
    """The drafter in `dspark/` of a target's folder, whose config, as `checkpoint.folder` reads it,
    is `config`.

    Quantised tensors stay quantised; plain ones become `dtype`. On a mesh each device gets its
    shard by `rules`. Raises ValueError when the config has no drafter, CheckpointError with
    everything that is wrong with the files.
    """
    folder = Path(folder) / DRAFTER
    drafter = abstract_drafter(config)
    plan, loader = _plan(open_files(folder), config), Loader(mesh=mesh, rules=rules)
    if plan.problems:
        raise CheckpointError(folder, plan.problems)
    parameters = _parameters(drafter)
    check_shardings(folder, plan, parameters, loader)
    return drafter, fill(parameters, plan, loader, dtype, progress)


def find_drafter_problems(files: CheckpointFiles, config: ModelConfig) -> list[str]:
    """Everything that keeps these files from being loaded as the drafter of a config."""
    return _plan(files, config).problems


def save_drafter(
    drafter: Drafter, config: ModelConfig, folder: Path | str, *, format: str | None = None
) -> None:
    """Writes `dspark/` into a target's folder, in the released names; it appears when complete.

    Without a `format` every weight is written as it is in memory, bit for bit. In "m3.1" or
    "mxfp8" the layers' projections are MXFP8 and all else BF16, as released; in "bf16" everything
    is BF16. Raises ValueError for an unknown format, or a `dspark/` that is not empty.
    """
    chosen = None if format is None else as_format(format)
    weights = {path: p.get_value() for path, p in _parameters(drafter).items()}
    kinds = {path: Kind.of(weight).wanted(path, chosen) for path, weight in weights.items()}
    config_json = _config_json(config, kinds)
    with all_or_nothing(Path(folder) / DRAFTER) as new:
        write_files(new, [_group(path, weights[path], kind) for path, kind in kinds.items()])
        write_config(new, config_json)


def abstract_drafter(config: ModelConfig) -> Drafter:
    """The drafter without values: its parameters are shapes."""
    return jax.eval_shape(lambda: Drafter(config, nnx.Rngs(0)))


def _parameters(drafter: Drafter) -> dict[str, nnx.Param]:
    return {names.DRAFTER + path: p for path, p in parameters_of(drafter).items()}


def _plan(files: CheckpointFiles, config: ModelConfig) -> Plan:
    assert config.drafter is not None
    parameters = _parameters(abstract_drafter(config)).items()
    shapes = {path: tuple(p.get_value().shape) for path, p in parameters}
    plan = make_plan(files, shapes, known_part=_nothing)
    form: Form = "mxfp8" if config.drafter.projections == "mxfp8" else "plain"
    found = sections(files.folder)
    for section in found:
        plan.problems += map_problems(section, plan.leaves)
    plan.problems += one_format_problems(found[0] if found else {}, plan.leaves, form)
    return plan


def _nothing(file_name: str) -> None:
    """What may be in the folder and is not loaded."""


def _group(path: str, weight: Weight, kind: Kind) -> Group:
    name = names.add_prefix(names.released_place(path).name)
    tensors = specs(name, tuple(weight.shape), kind)
    return Group(specs=tensors, produce=partial(arrays, weight, kind))


def _config_json(config: ModelConfig, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """`config.json` of a drafter whose parameters are stored so."""
    assert config.drafter is not None
    forms = {kind.form for path, kind in kinds.items() if is_projection(path)}
    if forms not in ({"plain"}, {"mxfp8"}):
        raise ValueError(
            f"the drafter's projections are {' and '.join(sorted(forms))}: in its folder they are "
            "all plain or all mxfp8"
        )
    stored: WeightFormat = "mxfp8" if "mxfp8" in forms else "bf16"
    config = replace(config, drafter=replace(config.drafter, projections=stored))
    return config.drafter_to_hf() | {"torch_dtype": kinds[names.DRAFTER + "fc.weight"].dtype.name}
