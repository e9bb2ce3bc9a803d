"""The decode rows of one rank's step: who takes part, how many drafts each tests, and the blocks
that they may write to.

A row is planned while the one before it may still be on the device, so only bounds of its length
are known: each speculative step adds from 1 to 1 + drafts tokens, each plain one exactly 1. Blocks
are reserved up to the most that may be written, with the anchor of the next step; the device
never writes at or beyond a sequence's limit.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from serving.scheduling.plan import NewBlocks, RankPlan
from serving.scheduling.rank import Rank
from serving.scheduling.request import Phase, Request
from serving.scheduling.room import Room
from serving.scheduling.rows import Row
from serving.scheduling.shapes import Shape, Shapes


class DraftChoice(NamedTuple):
    """How many drafts each of some sequences tests, at most as many as it has and near its limit
    fewer; and whether new ones are drawn for the step after. A step that tests any draws new ones.
    """

    widths: Sequence[int]
    proposes: bool


ChooseDrafts = Callable[[Sequence[Request]], DraftChoice]


def all_drafts(num_drafts: int, requests: Sequence[Request]) -> DraftChoice:
    """Tests all of `num_drafts` that each sequence always has."""
    return DraftChoice([num_drafts] * len(requests), proposes=num_drafts > 0)


def ready_rows(rank: Rank) -> list[Request]:
    """The sequences that may take part: their prompts are planned to the end, they surely have a
    token to come, and every token is known of those that need it.
    """
    return [
        one
        for one in rank.running
        if one.prefill_planned == one.prefill_target
        and one.least < one.limit
        and not (one.is_synchronous and one.steps_in_flight)
    ]


def plan_decodes(
    rank: Rank, ready: list[Request], choice: DraftChoice, steps: int, plan: RankPlan, room: Room
) -> tuple[list[Row], bool]:
    """Adds rows of `steps` device steps to the plan; and whether each had the blocks that it needs.

    Rows go first that are more urgent or older, and may take blocks from those behind them.
    """
    rows: list[Row] = []
    all_had_room, block_size = True, rank.block_size
    proposes = plan.proposes = choice.proposes
    slots, planned_widths, running = plan.decode_slots, plan.decode_widths, Phase.RUNNING
    for request, width in zip(ready, choice.widths, strict=True):
        if request.phase is not running:
            continue  # preempted by a row before it
        limit = request.limit
        if width and width >= limit - request.least:
            width = max(0, limit - request.least - 1)
        most = steps * (1 + width)
        end = request.most + most
        if end > limit:
            end = limit
        if end > len(request.blocks) * block_size and not _reserve(rank, request, end, plan, room):
            all_had_room = False
            continue
        least = 1 if width else steps
        request.least += least
        request.most += most
        request.steps_in_flight += 1
        request.has_drafts = proposes
        slots.append(request.slot)
        planned_widths.append(width)
        rows.append((request, least, most, 0, True, width))
        if len(request.blocks) > plan.decode_pages:
            plan.decode_pages = len(request.blocks)
    return rows, all_had_room


def decode_shape(shapes: Shapes, plans: Sequence[RankPlan], steps: int) -> Shape | None:
    """The shape that holds every rank's decode rows, None where there are none."""
    most = max(len(plan.decode_slots) for plan in plans)
    if most == 0:
        return None
    tokens = max(len(plan.decode_slots) + sum(plan.decode_widths) for plan in plans)
    pages = max(plan.decode_pages for plan in plans)
    return shapes.decode(rows=most, tokens=tokens, pages=pages, steps=steps)


def _reserve(rank: Rank, request: Request, end: int, plan: RankPlan, room: Room) -> bool:
    """Whether the sequence now has the blocks that it lacked up to position `end`."""
    first = len(request.blocks)
    missing = -(-end // rank.block_size) - first
    if not room.make(rank, missing, request.order):
        return False
    new = rank.grow(request, missing)
    plan.new_blocks.append(NewBlocks(slot=request.slot, first=first, block_ids=new))
    return True
