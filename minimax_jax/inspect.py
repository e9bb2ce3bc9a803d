"""What a checkpoint holds, from its headers alone: formats, bytes, parameters, layers, and what is
wrong with it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from configs.model import ModelConfig
from minimax_jax import names
from minimax_jax.checkpoint import abstract_model, find_problems
from minimax_jax.checkpoint.files import CheckpointFiles, open_files
from minimax_jax.checkpoint.folder import DRAFTER, read_config
from minimax_jax.checkpoint.stored import SUFFIXES
from minimax_jax.checkpoint.tensor_file import DTYPE_NAMES, DTYPES, SHOWN, Entry
from minimax_jax.speculative.checkpoint import find_drafter_problems

UNKNOWN = "unknown"
_SCALES = tuple(f"_{suffix}" for suffix in SUFFIXES if suffix != "packed")
# What a path contains -> the row it counts in; the first that fits.
_PARTS = {
    ".experts.": "routed experts",
    ".shared.": "shared expert",
    ".router.": "router",
    "norm": "norms",
    ".indexer.": "index projections",
    ".attention.": "attention projections",
    ".mlp.": "dense MLP",
    "embedding": "embedding",
    "head": "head",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Tensors of one part in one form. Scales count as bytes and tensors, not as parameters."""

    part: str
    form: str
    tensors: int
    parameters: int
    nbytes: int
    loaded: bool


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What `inspect_checkpoint` found; `problems` are those that a load would raise."""

    folder: Path
    config: ModelConfig
    files: int
    rows: tuple[Row, ...]
    problems: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(row.nbytes for row in self.rows)

    @property
    def parameters(self) -> int:
        """Parameters of the text model."""
        return sum(row.parameters for row in self.rows if row.loaded)


def inspect_checkpoint(folder: Path | str) -> Inspection:
    """Reads config and headers. CheckpointError if there is none of either to read."""
    folder = Path(folder)
    config, files = read_config(folder), open_files(folder)
    problems = find_problems(files, abstract_model(config, jnp.float32))
    counted = [(*_classify(files, entry), entry) for entry in files.entries.values()]
    num_files = len(files.shards)
    if (folder / DRAFTER / "config.json").is_file():
        drafter = open_files(folder / DRAFTER)
        problems += [f"{DRAFTER}/{p}" for p in find_drafter_problems(drafter, config)]
        counted += [(f"{DRAFTER}/", *_form(drafter, e), e) for e in drafter.entries.values()]
        num_files += len(drafter.shards)
    return Inspection(
        folder=folder,
        config=config,
        files=num_files,
        rows=tuple(_rows(counted)),
        problems=tuple(problems),
    )


def part_of(path: str) -> str:
    """The part of the text model that a parameter counts in, by its path."""
    return next(part for text, part in _PARTS.items() if text in path)


def print_inspection(inspection: Inspection, console: Console | None = None) -> None:
    """The table, the layers and the first problems."""
    console, config = console or Console(), inspection.config
    table = Table(title=f"{inspection.folder} ({inspection.files} files)")
    for heading in ("part", "form", "tensors", "parameters", "MB"):
        table.add_column(heading, justify="left" if heading in ("part", "form") else "right")
    for row in inspection.rows:
        name = row.part if row.loaded else f"{row.part} (not loaded)"
        numbers = (f"{row.tensors:,}", f"{row.parameters:,}", f"{row.nbytes / 1e6:,.2f}")
        table.add_row(name, row.form, *numbers)
    tensors = sum(row.tensors for row in inspection.rows)
    total = (f"{tensors:,}", f"{inspection.parameters:,}", f"{inspection.nbytes / 1e6:,.2f}")
    table.add_section()
    table.add_row("text model and all bytes", "", *total)
    console.print(table)
    console.print(
        f"{config.num_layers} layers: {sum(config.sparse_layers)} with sparse attention, "
        f"{config.num_moe_layers} with experts; context {config.max_context}"
    )
    for problem in inspection.problems[:SHOWN]:
        console.print(f"problem: {problem}", markup=False, highlight=False)
    if len(inspection.problems) > SHOWN:
        console.print(f"and {len(inspection.problems) - SHOWN} more problems")


def _rows(counted: Iterable[tuple[str, str, int, Entry]]) -> list[Row]:
    sums: dict[tuple[str, str], list[int]] = {}
    for part, form, parameters, entry in counted:
        row = sums.setdefault((part, form), [0, 0, 0])
        for i, value in enumerate((1, parameters, entry.nbytes)):
            row[i] += value
    order = [*_PARTS.values(), *names.KNOWN_PARTS, f"{DRAFTER}/", UNKNOWN]
    return [
        Row(
            part=part,
            form=form,
            tensors=tensors,
            parameters=parameters,
            nbytes=nbytes,
            loaded=part in _PARTS.values(),
        )
        for (part, form), (tensors, parameters, nbytes) in sorted(
            sums.items(), key=lambda item: (order.index(item[0][0]), item[0][1])
        )
    ]


def _classify(files: CheckpointFiles, entry: Entry) -> tuple[str, str, int]:
    """Part, form and parameters of a tensor."""
    known = names.known_part(entry.name)
    if known:
        return known, *_form(files, entry)
    found = names.path_of(_weight_name(names.strip_prefix(entry.name) or ""))
    if found is None:
        return UNKNOWN, *_form(files, entry)
    return part_of(found[0]), *_form(files, entry)


def _form(files: CheckpointFiles, entry: Entry) -> tuple[str, int]:
    """The form of the matrix that a tensor belongs to, and the parameters that it is."""
    weight = _weight_name(entry.name)
    codes = files.entries.get(weight) or files.entries.get(f"{weight}_packed") or entry
    nvfp4 = codes.dtype == DTYPES["U8"]
    quantized = {DTYPES["U8"]: "nvfp4", DTYPES["F8_E4M3"]: "mxfp8"}
    form = quantized.get(codes.dtype, DTYPE_NAMES[codes.dtype].lower())
    if entry is not codes:
        return form, 0
    return form, codes.nbytes * 2 if nvfp4 else codes.nbytes // codes.dtype.itemsize


def _weight_name(name: str) -> str:
    """The name of a matrix, from that of its codes or one of its scales."""
    for suffix in (*_SCALES, "_packed"):
        if name.endswith(f".weight{suffix}"):
            return name.removesuffix(suffix)
    return name
