"""The picture of what fits: sequences against context, one line a stage."""

import math
from dataclasses import replace
from pathlib import Path

from minimax_jax.capacity import Capacity, Question, capacity

POINTS_PER_DOUBLING = 32
STYLES = (":", "--", "-")  # keys and values alone, with index keys, with the drafter


def plot_capacity(title: str, answer: Capacity, picture: Path) -> None:
    """Draws how many sequences fit at each context up to the model's longest; a dot marks the one
    that was asked. Contexts at which nothing fits are left out; ValueError if that is all.
    """
    from matplotlib.figure import Figure  # 0.4 s, and only this picture needs it
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    question = answer.question
    contexts = _contexts(question)
    answers = [capacity(replace(question, context=context)) for context in contexts]
    if not any(stage.total_sequences for one in answers for stage in one.stages):
        raise ValueError(f"there is nothing to draw: no sequence of any length fits {title}")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for i, stage in enumerate(answer.stages):
        fits = [one.stages[i].total_sequences or math.nan for one in answers]
        name = f"{stage.name} alone" if i == 0 else f"and {stage.name}"
        axes.plot(contexts, fits, STYLES[i], color="tab:blue", label=f"{name} ({stage.format})")
    held = answer.held
    if held.total_sequences:
        label = f"asked: {held.total_sequences:,} of {question.context:,} tokens"
        axes.plot(question.context, held.total_sequences, "o", color="tab:red", label=label)
    axes.set(title=title, xlabel="context (tokens)", ylabel="sequences that fit, all GPUs")
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(ticks := _doublings(question), labels=[_short(tick) for tick in ticks])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=100)


def _contexts(question: Question) -> list[int]:
    """Block boundaries from the shortest tick on, at even steps of a logarithmic axis."""
    first, last = _doublings(question)[0], question.config.max_context
    block, steps = question.config.indexer.block_size, 0
    contexts = {last}
    while (context := first * 2 ** (steps / POINTS_PER_DOUBLING)) < last:
        contexts.add(min(last, -(-int(context) // block) * block))
        steps += 1
    return sorted(contexts)


def _doublings(question: Question) -> list[int]:
    """The model's longest context and its halves, ten at most, none shorter than a block."""
    longest, block = question.config.max_context, question.config.indexer.block_size
    return [longest >> i for i in reversed(range(10)) if longest >> i >= min(block, longest)]


def _short(tokens: int) -> str:
    """1048576 is 1M, 2048 is 2K, 1000 is 1000."""
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens % size == 0:
            return f"{tokens // size}{letter}"
    return str(tokens)
