"""What fits where: bytes of weights and pages on one GPU, and how many sequences they leave room
for.

No byte is counted by a formula of its own: weights are the model's parameters in their stored
formats (`capacity_weights`), pages are rows of the pool's layout. A GPU holds its share of the
weights, an overhead that the caller names, and as many whole blocks as the rest has room for. `dcp`
splits work and changes none of these, with `split` a GPU holds its part of every sequence's blocks;
with `sp` it holds attention's output projection whole.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from configs.model import ModelConfig
from configs.parallel import ParallelConfig
from configs.parts import check
from minimax_jax.cache import heads_of_rank, pool_layout
from minimax_jax.capacity.gpus import GB
from minimax_jax.capacity.weights import DRAFTER, WeightPart, weight_parts
from minimax_jax.quantize import Format
from pallas_kernels.layouts.pool import CacheFormats, PoolLayout

# Public figures for M3.1-Flash on four B300, attention data-parallel and experts spread, at 262,144
# tokens: 76 sequences with NVFP4 and 28 with FP8. They follow when pages are keys and values alone,
# neither drafter nor vision nor overhead takes memory, and 270 GB x 0.92 are usable (spec/serving
# 7.4; which memory was meant is not published, `Stage.same_from` and `same_below` bound it).
REFERENCE_MEMORY = 270 * GB
REFERENCE_UTILIZATION = 0.92
REFERENCE_WEIGHTS: dict[str, Format] = {"nvfp4": "m3.1", "fp8": "mxfp8"}  # by cache format


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model in some formats, on GPUs of some memory, at one length of its sequences."""

    config: ModelConfig
    parallel: ParallelConfig
    formats: CacheFormats
    memory_bytes: int  # of one GPU
    context: int  # tokens a sequence
    utilization: float = 0.92  # share of the memory that may be used
    overhead_bytes: int = 0  # on each GPU, for activations, workspaces and programs
    weights: Format | None = None  # None: as the config's quantisation says
    max_num_seqs: int | None = None  # a data rank

    def __post_init__(self) -> None:
        share, limit, most = self.utilization, self.config.max_context, self.max_num_seqs
        check(0 < share <= 1, f"utilization={share} is not in (0, 1]")
        check(self.memory_bytes > 0, f"a memory of {self.memory_bytes} bytes is not positive")
        check(self.overhead_bytes >= 0, f"an overhead of {self.overhead_bytes} bytes is negative")
        check(
            1 <= self.context <= limit,
            f"context={self.context} is not in 1..{limit}, the most that the model takes",
        )
        check(most is None or most >= 1, f"max_num_seqs={most} is not at least 1")

    @property
    def usable_bytes(self) -> int:
        """Bytes of one GPU for weights and pages."""
        return math.floor(self.memory_bytes * self.utilization) - self.overhead_bytes

    @property
    def layout(self) -> PoolLayout:
        """The pages of one rank. ValueError if its tp ranks cannot share the heads."""
        heads = heads_of_rank(self.config, self.parallel.tp, self.parallel.page_ranks)
        return pool_layout(self.config, self.formats, local_heads=heads)

    @property
    def blocks_per_sequence(self) -> int:
        """Whole blocks that a sequence takes."""
        return -(-self.context // self.config.indexer.block_size)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a GPU holds when one more kind of thing is kept beside those of the stages before."""

    name: str
    format: str  # of what this stage adds
    token_bytes: float  # on one GPU, of what this stage adds
    weight_bytes: int  # on one GPU, in all
    block_bytes: int  # of one block's row on one GPU, in all
    sequence_bytes: int  # on one GPU, in all
    num_blocks: int  # that fit on a GPU, or on those that share out a sequence's
    sequences: int  # that fit on a data rank
    total_sequences: int
    limit: str  # what keeps one more out: "weights", "memory" or "max_num_seqs"
    same_from: int  # the least usable bytes of a GPU with this answer
    same_below: int | None  # the first that would change it; None: more memory changes nothing


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The answer: the weights, the stages, and what the reference's way of counting gives."""

    question: Question
    weights: tuple[WeightPart, ...]
    stages: tuple[Stage, ...]

    @property
    def held(self) -> Stage:
        """The stage that counts everything."""
        return self.stages[-1]


def capacity(question: Question) -> Capacity:
    """What fits. ValueError for a parallelism that does not divide the model."""
    layout = question.layout
    parts = weight_parts(question.config, question.parallel, question.weights)
    held = _held(layout, parts)
    steps = zip([None, *held], held, strict=False)
    stages = tuple(_stage(question, before, now) for before, now in steps)
    return Capacity(question=question, weights=parts, stages=stages)


def as_the_reference(question: Question, cache_format: str) -> Stage:
    """The same question under the reference's assumptions, for pages in "nvfp4" or "fp8"."""
    formats = replace(question.formats, kv=cache_format, index=cache_format)
    asked = replace(
        question,
        formats=formats,
        weights=REFERENCE_WEIGHTS[cache_format],
        memory_bytes=REFERENCE_MEMORY,
        utilization=REFERENCE_UTILIZATION,
        overhead_bytes=0,
        max_num_seqs=None,
    )
    return capacity(asked).stages[0]


@dataclass(frozen=True, kw_only=True)
class _Held:
    """What a stage holds in all, and the format of what it adds."""

    name: str
    format: str
    layout: PoolLayout
    weight_bytes: int


def _held(layout: PoolLayout, parts: Sequence[WeightPart]) -> list[_Held]:
    """Keys and values alone; with index keys; with the drafter, its weights and its pages."""
    formats, everything = layout.formats, sum(part.gpu_bytes for part in parts)
    target = sum(part.gpu_bytes for part in parts if part.part != DRAFTER)
    indexed = replace(layout, draft_layers=0)
    alone = replace(indexed, sparse_layers=(False,) * len(layout.sparse_layers))
    held = [_Held(name="keys and values", format=formats.kv, layout=alone, weight_bytes=target)]
    if any(layout.sparse_layers):
        held.append(
            _Held(name="index keys", format=formats.index, layout=indexed, weight_bytes=target)
        )
    if layout.draft_layers:
        held.append(
            _Held(name=DRAFTER, format=formats.draft, layout=layout, weight_bytes=everything)
        )
    return held


def _stage(question: Question, before: _Held | None, held: _Held) -> Stage:
    """How many sequences fit beside the weights that are held."""
    block, weights = held.layout.block_bytes, held.weight_bytes
    page_ranks = question.parallel.page_ranks
    sequence = -(-question.blocks_per_sequence // page_ranks) * block
    room, most = question.usable_bytes - weights, question.max_num_seqs
    fitting = max(0, room // sequence)
    sequences = fitting if most is None else min(fitting, most)
    capped = sequences == most
    added = block - (0 if before is None else before.layout.block_bytes)
    return Stage(
        name=held.name,
        format=held.format,
        token_bytes=added / held.layout.block_size / page_ranks,
        weight_bytes=weights,
        block_bytes=block,
        sequence_bytes=sequence,
        num_blocks=max(0, room // block) * page_ranks,
        sequences=sequences,
        total_sequences=sequences * question.parallel.dp,
        limit="weights" if room < block else "max_num_seqs" if capped else "memory",
        same_from=weights + sequences * sequence if sequences else 0,
        same_below=None if capped else weights + (sequences + 1) * sequence,
    )
