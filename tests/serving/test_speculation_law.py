"""Scheduling changes nothing of what is generated: exact laws over all drafts, with the faults that
would change it (spec/dspark 4.2, 4.3).
"""

from itertools import product
from math import prod

import pytest

from serving.scheduling import speculation
from serving.scheduling.speculation import best_budget, early_stop_widths, widths_within
from tests.serving.exact import Law, Toy, difference, joint_law, law_of_text, mutated, target_law

A, B = 0, 1
# The paper's counterexample: the second draft's confidence tells which token the first one is.
PAPER = Toy(
    target=[(0.7, 0.3)] * 2,
    draft=[(0.5, 0.5)] * 2,
    confidence=lambda before: 0.8 if not before else {A: 0.9, B: 0.0}[before[0]],
)
PAPER_SECONDS = {0: 1 / 1.0, 1: 1 / 0.5, 2: 1 / 0.45}.__getitem__
# Three tokens, rows that depend on the one before, a confidence that gives away every draft.
THREE = Toy(
    target=[(0.5, 0.3, 0.2), (0.1, 0.6, 0.3), (0.25, 0.25, 0.5)],
    draft=[(0.2, 0.5, 0.3), (0.4, 0.4, 0.2), (0.6, 0.3, 0.1)],
    confidence=lambda before: prod(({0: 1.0, 1: 0.9, 2: 0.2}[x] for x in before), start=0.9),
)
EXACT = 1e-12


def stopping_early(survivals, stale):
    return early_stop_widths(survivals, PAPER_SECONDS)


def seconds(tested: int) -> float:
    return 1.0 + 0.4 * tested


def first_token(law: Law) -> list[float]:
    return [sum(p for text, p in law.items() if text[0] == token) for token in (A, B)]


def widths_of(schedule) -> set[int]:
    """The widths that the schedule chooses for some drafts of THREE."""
    return {schedule([THREE.survival((x, 0))], [THREE.survival((x, 0))])[0] for x in range(3)}


def test_the_papers_counterexample_keeps_its_law():
    assert early_stop_widths([PAPER.survival((A, A))], PAPER_SECONDS) == [0]
    law = joint_law([PAPER], stopping_early, [])
    assert first_token(law) == pytest.approx((0.7, 0.3), abs=EXACT)


def test_the_papers_counterexample_notices_that_the_early_stop_is_gone():
    looking_on = mutated(early_stop_widths, "break", "continue")
    law = joint_law([PAPER], lambda now, _: looking_on(now, PAPER_SECONDS), [])
    assert first_token(law) == pytest.approx((0.85, 0.15), abs=EXACT)


def test_the_papers_counterexample_notices_a_budget_from_the_drafts_under_test():
    def anticipating(now, stale):
        return widths_within(now, best_budget(now, PAPER_SECONDS)[0])

    law = joint_law([PAPER], anticipating, [])
    assert first_token(law) == pytest.approx((0.85, 0.15), abs=EXACT)


def test_a_budget_from_the_block_before_keeps_the_law_of_the_papers_counterexample():
    def scheduled(now, stale):
        return widths_within(now, best_budget(stale, PAPER_SECONDS)[0])

    assert scheduled([PAPER.survival((A, A))], [PAPER.survival((A, A))]) == [2]
    text = law_of_text(PAPER, scheduled, length=4)
    assert difference(text, target_law(PAPER, length=4)) < EXACT


@pytest.mark.parametrize(
    "schedule",
    [
        lambda now, stale: early_stop_widths(now, seconds),
        lambda now, stale: widths_within(now, best_budget(stale, seconds)[0]),
        lambda now, stale: widths_within(now, 1),
        lambda now, stale: [len(now[0])],
    ],
    ids=["early stop", "stale budget", "one draft", "all"],
)
def test_a_scheduled_text_has_the_targets_law(schedule):
    text = law_of_text(THREE, schedule, length=3)
    assert difference(text, target_law(THREE, length=3)) < EXACT


def test_the_schedules_that_are_held_to_the_law_do_depend_on_the_drafts():
    assert len(widths_of(lambda now, _: early_stop_widths(now, seconds))) > 1
    assert len(widths_of(lambda now, stale: [best_budget(stale, seconds)[0]])) > 1


def test_a_text_whose_budget_looks_at_the_drafts_under_test_has_another_law():
    def anticipating(now, stale):
        return widths_within(now, best_budget(now, PAPER_SECONDS)[0])

    text = law_of_text(THREE, anticipating, length=3)
    assert difference(text, target_law(THREE, length=3)) > 0.01


@pytest.mark.parametrize("budget", range(5))
def test_sequences_that_share_a_budget_have_independent_laws(budget):
    law = joint_law([THREE, PAPER], lambda now, _: widths_within(now, budget), [])
    assert difference(law, independent(THREE, PAPER)) < EXACT


def test_sequences_that_share_an_early_stop_have_independent_laws():
    law = joint_law([THREE, PAPER], lambda now, _: early_stop_widths(now, seconds), [])
    assert difference(law, independent(THREE, PAPER)) < EXACT


def test_ties_broken_towards_the_later_draft_change_the_law(monkeypatch):
    # If draft 1 is A, draft 2 is as likely to survive; so is the other sequence's only draft.
    tied = Toy(
        target=PAPER.target,
        draft=PAPER.draft,
        confidence=lambda before: 0.8 if not before else {A: 1.0, B: 0.5}[before[0]],
    )
    rival = Toy(target=PAPER.target, draft=PAPER.draft, confidence=lambda _: 0.8, num_drafts=1)
    wanted, ranked = independent(tied, rival), speculation._ranked

    def scheduled(now, stale):
        return widths_within(now, 1)

    assert difference(joint_law([tied, rival], scheduled, []), wanted) < EXACT
    monkeypatch.setattr(speculation, "_ranked", lambda rows: sorted(ranked(rows), reverse=True))
    assert difference(joint_law([tied, rival], scheduled, []), wanted) > 0.01


def independent(*toys: Toy) -> Law:
    """The law of first tokens that have nothing to do with one another."""
    return {
        tokens: prod(toy.target[0][token] for toy, token in zip(toys, tokens, strict=True))
        for tokens in product(*(range(len(toy.target)) for toy in toys))
    }
