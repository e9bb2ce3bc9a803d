"""The tables of names agree with one another."""

from dataclasses import fields

from sharding.axes import LETTERS, LOGICAL_AXES, MESH_AXES
from sharding.rules import REPLICATED_IF_UNEVEN, SERVE, TRAIN, Rules, as_tuple


def test_every_logical_axis_has_a_letter_and_a_rule():
    settings = ["transport", "index_ranks", "page_ranks", "overlap"]
    assert [field.name for field in fields(Rules)] == [*LOGICAL_AXES, *settings]
    assert set(LOGICAL_AXES.values()) - {"dp x tp", "tp"} <= set(LETTERS)
    assert set(LOGICAL_AXES) >= REPLICATED_IF_UNEVEN


def test_letters_never_differ_by_case_alone():
    assert all(letter.isupper() and len(letter) == 1 for letter in LETTERS)


def test_rules_name_axes_of_the_mesh():
    for rules in (SERVE, TRAIN):
        for axis in LOGICAL_AXES:
            assert set(as_tuple(getattr(rules, axis))) <= set(MESH_AXES)
