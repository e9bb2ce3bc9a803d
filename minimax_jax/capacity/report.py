"""What fits, as tables for a person and as JSON for a program. GB are 10^9 bytes."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from minimax_jax.capacity import (
    REFERENCE_MEMORY,
    REFERENCE_UTILIZATION,
    REFERENCE_WEIGHTS,
    Capacity,
    Question,
    Stage,
)
from minimax_jax.capacity.gpus import GB
from minimax_jax.capacity.weights import WeightPart

Reference = Mapping[str, Stage]  # by cache format; empty where the reference has no figure


def print_capacity(title: str, answer: Capacity, reference: Reference, console: Console) -> None:
    """Weights by part, pages by stage, what fits, and what was assumed."""
    question = answer.question
    console.print(_weights_table(title, answer))
    console.print(_pages_table(answer))
    console.print(_fitting_table(answer))
    held = answer.held
    console.print(
        f"Fits: {held.total_sequences:,} sequences of {question.context:,} tokens, everything "
        f"counted. {_limit(answer)}"
    )
    console.print(_assumptions(question))
    if reference:
        console.print(_reference(reference))


def capacity_json(answer: Capacity, reference: Reference) -> dict[str, Any]:
    """The same as plain values; bytes are whole numbers."""
    question = answer.question
    return {
        "parallel": str(question.parallel),
        "num_gpus": question.parallel.num_devices,
        "context": question.context,
        "block_size": question.config.indexer.block_size,
        "memory_bytes": question.memory_bytes,
        "utilization": question.utilization,
        "overhead_bytes": question.overhead_bytes,
        "usable_bytes": question.usable_bytes,
        "weights": [asdict(part) for part in answer.weights],
        "stages": [asdict(stage) for stage in answer.stages],
        "sequences": answer.held.total_sequences,
        "limit": answer.held.limit,
        "reference": {name: asdict(stage) for name, stage in reference.items()},
    }


def _weights_table(title: str, answer: Capacity) -> Table:
    table = _table(title, "weights", "model GB", "GPU GB", "on each GPU")
    for part in answer.weights:
        table.add_row(part.part, _gb(part.total_bytes), _gb(part.gpu_bytes), _share(part))
    total = sum(part.total_bytes for part in answer.weights)
    table.add_section()
    table.add_row("all", _gb(total), _gb(sum(part.gpu_bytes for part in answer.weights)), "")
    return table


def _pages_table(answer: Capacity) -> Table:
    question = answer.question
    table = _table("", "pages", "format", "bytes a token", "GB a sequence")
    tokens = question.blocks_per_sequence * question.config.indexer.block_size
    for stage in answer.stages:
        added = stage.token_bytes * tokens
        table.add_row(stage.name, stage.format, _number(stage.token_bytes), _gb(added))
    table.add_section()
    all_bytes = _number(sum(stage.token_bytes for stage in answer.stages))
    table.add_row("all, on one GPU", "", all_bytes, _gb(answer.held.sequence_bytes))
    return table


def _fitting_table(answer: Capacity) -> Table:
    question = answer.question
    ranks, block_size = question.parallel.dp, question.config.indexer.block_size
    table = _table("", "what fits", "tokens a rank", "sequences", f"x {ranks}", "at usable GB")
    for i, stage in enumerate(answer.stages):
        name = f"and {stage.name}" if i else f"{stage.name} alone"
        tokens, window = f"{stage.num_blocks * block_size:,}", _window(stage)
        table.add_row(name, tokens, f"{stage.sequences:,}", f"{stage.total_sequences:,}", window)
    return table


def _limit(answer: Capacity) -> str:
    held, usable = answer.held, answer.question.usable_bytes
    if held.limit == "weights":
        return (
            f"The weights bind: {_gb(held.weight_bytes)} GB a GPU leave no block's room in "
            f"{_gb(usable)} GB."
        )
    if held.limit == "max_num_seqs":
        return f"max_num_seqs={answer.question.max_num_seqs} binds."
    used = held.weight_bytes + held.sequences * held.sequence_bytes
    return (
        f"Memory for pages binds: {_gb(usable - used)} GB of {_gb(usable)} are left, one more "
        f"takes {_gb(held.sequence_bytes)}."
    )


def _assumptions(question: Question) -> str:
    config = question.config
    return (
        f"Usable: {_gb(question.memory_bytes)} GB x {question.utilization:g} - "
        f"{_gb(question.overhead_bytes)} overhead (activations, workspaces, programs: not "
        f"estimated, --overhead) = {_gb(question.usable_bytes)} GB a GPU. A sequence takes whole "
        f"blocks of {config.indexer.block_size} tokens and shares none. Vision is not loaded."
    )


def _reference(reference: Reference) -> str:
    counts = " and ".join(
        f"{stage.total_sequences:,} with {name} pages and {REFERENCE_WEIGHTS[name]} weights "
        f"(usable {_window(stage)} GB)"
        for name, stage in reference.items()
    )
    return (
        "As the published figures count (keys and values alone, no drafter, vision or overhead, "
        f"{REFERENCE_MEMORY / GB:g} GB x {REFERENCE_UTILIZATION:g} usable): {counts}."
    )


def _share(part: WeightPart) -> str:
    """How much of a part each GPU has."""
    times = part.total_bytes / part.gpu_bytes
    if times == 1:
        return "a copy"
    return f"1/{times:.0f}" if times == round(times) else f"{1 / times:.1%}"


def _window(stage: Stage) -> str:
    low = f"{stage.same_from / GB:.1f}"
    return f"{low} up" if stage.same_below is None else f"{low} to {stage.same_below / GB:.1f}"


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title or None, title_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def _gb(num_bytes: int | float) -> str:
    gb = num_bytes / GB
    return f"{gb:,.2f}" if gb >= 0.1 or gb <= 0 else f"{gb:.2g}"


def _number(value: int | float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"
