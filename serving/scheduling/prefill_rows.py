"""The prefill rows of one rank's step, and how the prompts share the tokens that decoding leaves.

The first in order (the most urgent, then the oldest) has half of them for certain, so it always
gets on; the rest goes to the others of its priority and then of the next, the shortest remainder
first, so a short prompt does not wait for a long one. What is left over goes to the first again.
"""

from collections.abc import Sequence

from serving.scheduling.plan import PrefillRow, RankPlan
from serving.scheduling.rank import Rank
from serving.scheduling.request import Request
from serving.scheduling.rows import Row
from serving.scheduling.shapes import Shape, Shapes


def plan_prefills(rank: Rank, plan: RankPlan, max_tokens: int) -> list[Row]:
    """Adds chunks to a plan that has its decode rows, up to `max_tokens` tokens in all."""
    prefilling = rank.prefilling()
    budget = max_tokens - len(plan.decode_slots) - sum(plan.decode_widths)
    chunks = share(prefilling, budget, rank.block_size)
    return [
        _plan_chunk(request, length, plan)
        for request, length in zip(prefilling, chunks, strict=True)
        if length
    ]


def prefill_shape(
    shapes: Shapes, plans: Sequence[RankPlan], rows: Sequence[Sequence[Row]]
) -> Shape | None:
    """The shape that holds every rank's chunks, None where there are none."""
    if not any(plan.prefills for plan in plans):
        return None
    tokens = max(sum(chunk.length for chunk in plan.prefills) for plan in plans)
    pages = max(len(request.blocks) for own in rows for request, _, _, end, _, _ in own if end)
    return shapes.prefill(tokens=tokens, pages=pages)


def share(prefilling: Sequence[Request], budget: int, block_size: int) -> list[int]:
    """Tokens of each prompt's next chunk, 0 where it gets none; `budget` together at most.

    Requests come in their order. A chunk ends at a block's boundary if it reaches one, except the
    last of a prompt, so that the next one's tiles are whole blocks.
    """
    if not prefilling:
        return []
    remaining = [one.prefill_target - one.prefill_planned for one in prefilling]
    chunks = [0] * len(prefilling)
    others = range(1, len(prefilling))
    others = sorted(others, key=lambda i: (prefilling[i].order[0], remaining[i], i))
    first = min(remaining[0], budget - budget // 2 if others else budget)
    left = budget - first
    for index in others:
        length = min(remaining[index], left)
        chunks[index] = _aligned(prefilling[index], length, block_size)
        left -= chunks[index]
    chunks[0] = _aligned(prefilling[0], min(remaining[0], first + left), block_size)
    return chunks


def _plan_chunk(request: Request, length: int, plan: RankPlan) -> Row:
    start = request.prefill_planned
    end = request.prefill_planned = start + length
    is_last = request.has_drafts = end == request.prefill_target
    new = int(is_last and not request.yields_nothing)
    request.least += new
    request.most += new
    request.steps_in_flight += 1
    chunk = PrefillRow(slot=request.slot, start=start, length=length, is_last=is_last)
    plan.prefills.append(chunk)
    return request, new, new, end, is_last, 0


def _aligned(request: Request, length: int, block_size: int) -> int:
    """The chunk's length with its end moved back to a block's boundary where there is one."""
    end = request.prefill_planned + length
    boundary = end - end % block_size
    if end == request.prefill_target or boundary <= request.prefill_planned:
        return length
    return boundary - request.prefill_planned
