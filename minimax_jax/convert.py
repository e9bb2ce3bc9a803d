"""One checkpoint into another, in other formats or with fewer layers, matrix by matrix."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from configs.model import ModelConfig
from minimax_jax import names
from minimax_jax.checkpoint import abstract_model, known_entries, read_plan
from minimax_jax.checkpoint.files import read_json
from minimax_jax.checkpoint.folder import (
    config_json,
    copy_companions,
    cut_config,
    read_target_config,
    write_config,
)
from minimax_jax.checkpoint.plan import LeafPlan
from minimax_jax.checkpoint.read import host_weight
from minimax_jax.checkpoint.write import (
    MAX_SHARD_BYTES,
    Group,
    Kind,
    all_or_nothing,
    arrays,
    copied,
    specs,
    write_files,
)
from minimax_jax.checkpoint.write import Progress as Report
from minimax_jax.names import Place
from minimax_jax.quantize import as_format


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What is going to be written: tensors in groups, `config.json`, and files that come along."""

    source: Path
    groups: list[Group]
    config: dict[str, Any]
    drafter: bool  # whether `dspark/` comes along: not with a cut, which may take away its layers

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(group.nbytes for group in self.groups)

    def write(
        self, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES, progress: Report | None = None
    ) -> None:
        """Writes the folder, or nothing; ValueError if it is there and not empty."""
        with all_or_nothing(folder) as new:
            write_files(new, self.groups, max_shard_bytes, progress)
            write_config(new, self.config)
            copy_companions(self.source, new, drafter=self.drafter)


def convert(
    source: Path | str,
    folder: Path | str,
    *,
    format: str,
    layers: Sequence[int] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    console: Console | None = None,
) -> Conversion:
    """Writes `source` to `folder` in a format ("m3.1", "mxfp8", "bf16"), with a progress bar.

    `layers` keeps only these, renumbered in this order, for a small variant to try a set-up with.
    Matrices that have the format's form already keep their bits. Vision, MTP and drafter tensors
    and scales of activations and caches are copied byte for byte; with `layers`, those of layers
    that go are left out, and so is the drafter. Raises ValueError with one sentence for an unknown
    format or layer or a folder that is not empty, CheckpointError for a damaged source.
    """
    conversion = plan_conversion(Path(source), format=format, layers=layers)
    columns = [TextColumn("{task.description}"), BarColumn(), DownloadColumn()]
    with Progress(*columns, TimeRemainingColumn(), console=console or Console(stderr=True)) as bar:
        task = bar.add_task(f"{format}", total=conversion.nbytes)
        conversion.write(
            Path(folder), max_shard_bytes, lambda _, nbytes: bar.update(task, advance=nbytes)
        )
    return conversion


def plan_conversion(
    source: Path, *, format: str, layers: Sequence[int] | None = None
) -> Conversion:
    """Everything that `convert` will write, from the source's headers."""
    chosen = as_format(format)
    config, root = read_target_config(source), read_json(source / "config.json")
    plan = read_plan(source, abstract_model(config, jnp.float32))
    renumbered = _renumbered(layers, config.num_layers)
    if layers is not None:
        root = cut_config(root, list(layers))
        config = ModelConfig.from_hf(root)
    kinds: dict[str, Kind] = {}
    groups: list[Group] = []
    for leaf in plan.leaves:
        path = _renamed(leaf.path, names.path_layer(leaf.path), renumbered)
        if path is not None:
            kinds[path] = _kind(leaf).wanted(path, chosen)
            groups += _groups(leaf, path, kinds[path])
    for entry in known_entries(source):
        name = _renamed(entry.name, names.layer_number(entry.name), renumbered)
        dropped = layers is not None and names.known_part(entry.name) == "dspark"
        if name is not None and not dropped:
            groups.append(copied(entry, name))
    return Conversion(
        source=source,
        groups=groups,
        config=config_json(config, kinds, root),
        drafter=layers is None,
    )


def _renumbered(layers: Sequence[int] | None, num_layers: int) -> dict[int, int]:
    """Old layer number -> new one."""
    if layers is None:
        return {layer: layer for layer in range(num_layers)}
    wrong = [layer for layer in layers if not 0 <= layer < num_layers]
    if wrong or not layers or len(set(layers)) < len(layers):
        raise ValueError(
            f"layers {','.join(map(str, layers))} are not different layers of 0..{num_layers - 1}"
        )
    return {layer: i for i, layer in enumerate(layers)}


def _renamed(name: str, layer: int | None, renumbered: dict[int, int]) -> str | None:
    """The name in the new numbering; None for a layer that goes."""
    if layer is None:
        return name
    return names.with_layer(name, renumbered[layer]) if layer in renumbered else None


def _kind(leaf: LeafPlan) -> Kind:
    return Kind(form=leaf.form, dtype=leaf.tensors[0].parts[0].dtype, divides=leaf.divides)


def _groups(leaf: LeafPlan, path: str, kind: Kind) -> Iterator[Group]:
    """The tensors that a leaf becomes; of the source's experts, one at a time where they lie so."""
    place = names.released_place(path)
    if place.layout != "per expert":
        tensors = specs(names.add_prefix(place.name), leaf.shape, kind)
        yield Group(specs=tensors, produce=partial(_matrix, leaf, kind))
        return
    experts = [
        specs(names.add_prefix(name), leaf.shape[1:], kind) for name in place.names(leaf.shape[0])
    ]
    if leaf.place.layout != "per expert":
        together = tuple(spec for tensors in experts for spec in tensors)
        yield Group(specs=together, produce=partial(_stack, leaf, kind))
        return
    for e, tensors in enumerate(experts):
        one = replace(
            leaf,
            shape=leaf.shape[1:],
            place=Place(name=leaf.place.name),
            tensors=(leaf.tensors[e],),
        )
        yield Group(specs=tensors, produce=partial(_matrix, one, kind))


def _matrix(leaf: LeafPlan, kind: Kind) -> list[np.ndarray]:
    return arrays(host_weight(leaf), kind)


def _stack(leaf: LeafPlan, kind: Kind) -> Iterator[np.ndarray]:
    weight = host_weight(leaf)
    for e in range(leaf.shape[0]):
        yield from arrays(jax.tree.map(lambda part, e=e: part[e], weight), kind)
