"""What a row's result does to its sequence."""

from dataclasses import dataclass

from serving.rank import Rank
from serving.request import Request
from serving.rows import Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """New tokens of a sequence; its `finish_reason` may be set now."""

    request: Request
    new_tokens: list[int]


def take_row(rank: Rank, row: Row, tokens: list[int], is_broken: bool) -> Progress | None:
    """Counts a row as done, adds its tokens, and publishes the blocks that it completed.

    None where there is nothing to tell: a chunk that is not the last, or a sequence that had ended
    before, whose late tokens are dropped.
    """
    request = row.request
    request.steps_in_flight -= 1
    if request.finish_reason is not None:
        return None
    taken = request.take(tokens)
    request.least += len(taken) - row.least
    request.most += len(taken) - row.most
    if row.drafts:
        request.draft_tokens += row.drafts
        request.accepted_tokens += max(0, len(taken) - 1)
    if request.finish_reason is None and is_broken:
        request.finish_reason = "error"
    if request.finish_reason is None and row.end and row.is_last and request.yields_nothing:
        request.finish_reason = "length"
    # The newest token's own keys may not be there yet, whichever way a step goes about it.
    request.computed = row.end or request.num_tokens - 1
    rank.publish(request)
    if row.end and not row.is_last and not is_broken:
        return None
    return Progress(request=request, new_tokens=taken)
