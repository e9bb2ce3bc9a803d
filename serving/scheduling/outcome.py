"""What a row's result does to its sequence."""

from typing import NamedTuple

from serving.scheduling.rank import Rank
from serving.scheduling.request import Request
from serving.scheduling.rows import Row


class Progress(NamedTuple):
    """New tokens of a sequence; its `finish_reason` may be set now."""

    request: Request
    new_tokens: list[int]


def take_row(rank: Rank, row: Row, tokens: list[int], is_broken: bool) -> Progress | None:
    """Counts a row as done, adds its tokens, and publishes the blocks that it completed.

    None where there is nothing to tell: a chunk that is not the last, or a sequence that had ended
    before, whose late tokens are dropped.
    """
    request, least, most, end, is_last, drafts = row
    request.steps_in_flight -= 1
    if request.finish_reason is not None:
        return None
    taken = request.take(tokens)
    count = len(taken)
    request.least += count - least
    request.most += count - most
    if drafts:
        request.draft_tokens += drafts
        request.accepted_tokens += count - 1 if count else 0
    if is_broken and request.finish_reason is None:
        request.finish_reason = "error"
    if end and is_last and request.yields_nothing and request.finish_reason is None:
        request.finish_reason = "length"
    # The newest token's own keys may not be there yet, whichever way a step goes about it.
    request.computed = end or len(request.tokens) - 1
    if request.computed >= (request.published + 1) * rank.block_size:
        rank.publish(request)
    if end and not is_last and not is_broken:
        return None
    return Progress(request, taken)
