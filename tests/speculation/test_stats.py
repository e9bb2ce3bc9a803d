"""The counts of speculation, by hand."""

from minimax_jax.speculative.stats import SpeculationStats


def test_the_counts_of_three_steps():
    stats = SpeculationStats()
    stats.record(tested=3, accepted=2, committed=3, num_drafts=3)
    stats.record(tested=3, accepted=0, committed=1, num_drafts=3)
    stats.record(tested=1, accepted=1, committed=1, num_drafts=3)  # stopped at the draft
    assert stats.to_dict() == {
        "steps": 3,
        "drafted": 7,
        "accepted": 3,
        "acceptance_length": 1.6667,
        "per_position": [0.6667, 0.3333, 0.0],
    }
    assert str(stats) == (
        "1.67 tokens a step, 3 of 7 drafts accepted in 3 steps, by place 0.67 0.33 0.00"
    )


def test_a_total_adds_up_and_leaves_its_parts_alone():
    narrow, wide = SpeculationStats(), SpeculationStats()
    narrow.record(tested=1, accepted=1, committed=2, num_drafts=1)
    wide.record(tested=2, accepted=2, committed=3, num_drafts=2)
    total = SpeculationStats.total([narrow, wide])
    assert (total.steps, total.drafted, total.committed) == (2, 3, 5)
    assert total.reached == [2, 1] and narrow.reached == [1]


def test_no_step_is_no_division():
    assert SpeculationStats().to_dict()["acceptance_length"] == 0.0
    assert str(SpeculationStats()).endswith("in 0 steps, by place -")
