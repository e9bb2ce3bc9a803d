"""The first implementation that does not refuse runs, or the one named; refusals are sentences."""

import jax
import pytest

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation, choose, explain


def _limit(most):
    return lambda rows, *, wide=False: None if rows <= most else f"{rows} rows are more than {most}"


TABLE = (
    Implementation("fast", lambda rows, **options: "fast", _limit(8)),
    Implementation("middle", lambda rows, **options: "middle", _limit(64)),
)
WITH_REFERENCE = (*TABLE, Implementation("reference", lambda rows, **options: "reference"))


@pytest.mark.parametrize(("rows", "expected"), [(8, "fast"), (9, "middle"), (65, "reference")])
def test_the_first_that_does_not_refuse_runs(rows, expected):
    assert choose(WITH_REFERENCE, None, rows, wide=True).run(rows) == expected


def test_a_named_implementation_runs_although_an_earlier_one_would():
    assert choose(WITH_REFERENCE, "reference", 1).name == "reference"


def test_a_named_implementation_that_refuses_is_not_replaced():
    sentence = "^no implementation takes these arguments: fast: 9 rows are more than 8$"
    with pytest.raises(ValueError, match=sentence):
        choose(WITH_REFERENCE, "fast", 9)


def test_when_all_refuse_every_reason_is_given():
    with pytest.raises(ValueError, match="fast: 65 rows .* than 8; middle: 65 rows .* than 64$"):
        choose(TABLE, None, 65)


def test_an_unknown_name_lists_the_known_ones():
    sentence = "^implementation 'slow' is not one of fast, middle, reference$"
    with pytest.raises(ValueError, match=sentence):
        choose(WITH_REFERENCE, "slow", 1)


def test_explain_gives_each_implementations_answer():
    lines = explain(WITH_REFERENCE, 20).splitlines()
    assert lines == ["fast: 20 rows are more than 8", "middle: runs", "reference: runs"]


def test_on_a_gpu_the_reference_says_why_it_runs(monkeypatch):
    monkeypatch.setattr(dispatch, "_on_gpu", lambda: True)
    with pytest.warns(UserWarning, match="reference runs on a GPU: fast: 65 rows .*; middle: 65"):
        assert choose(WITH_REFERENCE, None, 65).name == "reference"
    assert choose(WITH_REFERENCE, "reference", 65).name == "reference"  # asked for: no warning


def test_the_device_is_refused_with_a_sentence():
    assert dispatch.refuse_device() == f"needs a GPU, and JAX runs on {jax.default_backend()}"
