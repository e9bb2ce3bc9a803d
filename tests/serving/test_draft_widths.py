"""The planner of drafts inside the engine: what it is told, and what it makes of it."""

import asyncio

from serving.engine.draft_widths import DraftWidths
from serving.scheduling.request import Request
from tests.serving.engines import alone, asked, collect, grammar, run, running
from tests.serving.load import COSTS

DEAR, FREE = COSTS["dear tokens"], COSTS["free tokens"]


def request(name: str, **options) -> Request:
    """One that has drafts."""
    one = asked(name, 5, max_tokens=40, **options)
    made = Request(one, 0, seed=0, arrival=0, max_model_len=512)
    made.has_drafts = True
    return made


def requests(count: int) -> list[Request]:
    return [request(f"r{i}") for i in range(count)]


def test_without_costs_all_drafts_are_tested_but_for_those_beyond_the_limit():
    widths, (one, other) = DraftWidths(3), requests(2)
    other.least = other.limit - 2
    assert widths([one, other]) == ([3, 1], True) and not widths.learns


def test_what_was_not_drawn_is_not_tested():
    widths, (one, other) = DraftWidths(3), requests(2)
    one.has_drafts = False
    assert widths([one, other]) == ([0, 3], True)


def test_a_row_with_a_grammar_tests_what_it_has_masks_for():
    widths = DraftWidths(3)
    bound = request("g", structured_outputs=grammar("regex", "a"))
    widths.limit = lambda _: 1
    assert widths([bound, *requests(1)]).widths == [1, 3]


def test_drafts_that_are_never_kept_are_not_tested_and_not_drawn_where_that_costs():
    widths, (one,) = DraftWidths(7, DEAR), requests(1)
    assert widths([one]) == ([7], True)
    for step in range(40):
        widths.learn(step, {}, [(7, 0)])
        widths.step = step + 1
    assert widths([one]) == ([0], False)


def test_confidences_of_two_steps_ago_decide_between_sequences():
    widths, (one, other) = DraftWidths(7, DEAR), requests(2)
    sure, unsure = [0.99] * 7, [0.01] * 7
    widths.learn(3, {"r0/0": sure, "r1/0": unsure}, [])
    widths.step = 4
    early = widths([one, other]).widths
    widths.step = 5
    first, second = widths([one, other]).widths
    assert early[1] > 0 and first > 0 and second == 0
    widths.forget(other)
    assert widths([one, other]).widths[1] > 0


def drafted(costs, good: int) -> tuple[list[list[int]], float, int]:
    """Tokens of some requests, drafts a row, and what the planner still remembers."""

    async def test():
        options = {"num_speculative_tokens": 7, "max_num_batched_tokens": 128}
        async with running(engine={"costs": costs}, good_drafts=good, **options) as it:
            streams = [it.submit(f"r{i}", 5 + i, max_tokens=80) for i in range(6)]
            wholes = await asyncio.gather(*map(collect, streams))
            counted, rows = (
                it.engine.statistics,
                [width for plan in it.device.plans for width in plan.ranks[0].decode_widths],
            )
            await it.idle()
            remembered = len(it.engine._steps._widths._planner)
            in_flight = 6 * 7  # a row of each that ended while the device ran it counts nowhere
            assert sum(rows) - in_flight <= counted.draft_tokens <= sum(rows)
            return [one.tokens for (one,) in wholes], sum(rows) / len(rows), remembered

    return run(test)


def test_what_a_step_costs_changes_how_many_are_tested_and_nothing_else():
    expected = [alone(5 + i, max_tokens=80) for i in range(6)]
    cheap, dear = drafted(FREE, good=7), drafted(DEAR, good=0)
    assert cheap[0] == dear[0] == expected
    assert cheap[1] > 2 * dear[1]
    assert cheap[2] == dear[2] == 0
