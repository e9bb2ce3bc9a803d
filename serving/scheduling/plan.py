"""What a step is to do, and what it did: plain data, picklable, the same on every process.

Block ids are counted per data rank and slots are a rank's device rows. A slot keeps its tokens,
position and block table on the device, so a plan says only what changes: which sequence came into a
slot, which blocks were added, and which slots take part.
"""

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from serving.scheduling.sampling_params import SamplingParams
from serving.scheduling.shapes import Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """A sequence that begins in a slot, or comes back. Whatever the slot held before is void."""

    slot: int
    request_id: str
    index: int
    tokens: array  # all that are known, prompt first; chunks are cut from them
    prompt_length: int
    limit: int  # the first position that is not generated
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    adapter: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NewBlocks:
    """Entries `first`, `first` + 1, ... of a slot's block table."""

    slot: int
    first: int
    block_ids: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillRow:
    """Tokens start..start+length-1 of a slot's sequence. The last chunk samples the next token."""

    slot: int
    start: int
    length: int
    is_last: bool


@dataclass(kw_only=True, slots=True)
class RankPlan:
    """The part of one data rank. Rows of `decode_slots` test `decode_widths` drafts each, and
    afterwards have new ones if the rank `proposes`; without that they test none. `decode_pages` are
    the blocks of the longest of them.
    """

    admissions: list[Admission] = field(default_factory=list)
    new_blocks: list[NewBlocks] = field(default_factory=list)
    prefills: list[PrefillRow] = field(default_factory=list)
    decode_slots: list[int] = field(default_factory=list)
    decode_widths: list[int] = field(default_factory=list)
    decode_pages: int = 0
    proposes: bool = False

    @property
    def has_rows(self) -> bool:
        """Whether anything runs."""
        return bool(self.prefills or self.decode_slots)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One dispatch of all ranks: first the prefill, then the decode, each if it has a shape."""

    step_id: int
    ranks: list[RankPlan]
    prefill_shape: Shape | None
    decode_shape: Shape | None


class RowLogprobs(NamedTuple):
    """Log-probabilities of consecutive tokens of a row, and the likeliest ids at each place."""

    values: list[float]
    top_ids: list[list[int]]
    top_values: list[list[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """The new tokens of each row of a `RankPlan`, in its order; none of a chunk that is not the
    last. `broken` are slots whose logits were NaN: their tokens end there.

    By slot, where the sequence wants it: `logprobs` of the new tokens; `prompt_logprobs` of the
    prompt tokens start + 1 .. start + length of a chunk, as far as there are such; and with
    speculation the `drafts` that the next step tests, with the `confidences` that each is kept
    together with those before it.
    """

    prefills: list[list[int]] = field(default_factory=list)
    decodes: list[list[int]] = field(default_factory=list)
    broken: frozenset[int] = frozenset()
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    drafts: dict[int, list[int]] = field(default_factory=dict)
    confidences: dict[int, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What the dispatch of that plan gave."""

    step_id: int
    ranks: list[RankResult]
