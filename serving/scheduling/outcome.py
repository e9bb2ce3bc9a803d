"""What a row's result does to its sequence."""

from typing import TypeAlias

from serving.scheduling.rank import Rank
from serving.scheduling.request import Request
from serving.scheduling.rows import Row

# A sequence, whose `finish_reason` may be set now, and its new tokens. A plain pair, since there is
# one of each running sequence in each step.
Progress: TypeAlias = tuple[Request, list[int]]


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
    if count != least:
        request.least += count - least
    if count != most:
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
    return request, taken
