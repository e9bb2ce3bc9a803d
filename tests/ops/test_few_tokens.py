"""The experts' kernels for at most 8 tokens, the shared expert with them: their lanes in numpy,
their lowering, what they refuse.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import mxfp8_lanes, nvfp4_lanes
from pallas_kernels.grouped_matmul import (
    Activation,
    Matrices,
    few_groups,
    few_mixture,
    few_plan,
    few_tokens,
    matching_rows,
    mixture,
    mosaic,
    page_lanes,
    shared_lanes,
    shared_units,
)
from pallas_kernels.layouts.mxfp8 import MXFP8Tensor
from pallas_kernels.layouts.nvfp4_pages import CODE_BYTES, LINE, LINES, NVFP4Pages
from tests.numerics import assert_close
from tests.ops.emulated_lanes import Ref
from tests.ops.lane_emulator import launch

MODULES = (few_tokens, few_groups, matching_rows, page_lanes, shared_lanes, shared_units)
MODULES += (mxfp8_lanes, nvfp4_lanes)
BF16 = ml_dtypes.bfloat16
E, D, F = 6, 1024, 512  # D is in two parts for the shared expert, F in one
CTAS, TEAMS = 16, 2
MEANING = jax.jit(mixture, static_argnames="activation")


class _Codes(Ref):
    """Tiles of 8 x 128 bytes with the 128-byte swizzle."""

    def take(self, values):
        pieces = values.view(np.uint8).reshape(-1, 8, 8, 16)
        to = self.array.reshape(-1, 8, 8, 16)
        for row, piece in np.ndindex(8, 8):
            to[:, row, piece ^ row] = pieces[:, row, piece]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([3, 5, 3, 1], ([3, 5, 1], [0, 8, 1, 17])),
        ([-1, 2, 6, 2], ([2], [99, 0, 99, 1])),
        ([7, -3, 6, 99], ([], [99] * 4)),
    ],
)
def test_groups_are_the_experts_that_are_here_in_the_order_in_which_they_are_met(
    monkeypatch, ids, expected
):
    found, place = Ref(np.full(64, -7, np.int32)), Ref(np.full(4, -7, np.int32))

    def kernel(ids, found, place):
        few_groups.list_groups(4, E)(ids, found, 0)
        few_groups.store_places(4, E, 2, 99)(ids, place, 0)

    launch(monkeypatch, (few_groups,), 1, kernel, Ref(np.array(ids, np.int32)), found, place)
    experts, places = expected
    assert found.array[few_groups.COUNT] == len(experts)
    assert found.array[: len(experts)].tolist() == experts
    assert place.array.tolist() == places


def _weights():
    """Random codes of both formats, with scales that leave values of a few hundredths."""
    rng = np.random.default_rng(0)

    def routed(rows, columns):
        pages = rng.integers(0, 256, (E, rows // 32, columns // 128, LINES * LINE), dtype=np.uint8)
        pages[..., CODE_BYTES:] = pages[..., CODE_BYTES:] % 32 + 0x28
        pages = jnp.asarray(pages.reshape(*pages.shape[:-1], LINES, LINE))
        return NVFP4Pages(pages, jnp.asarray(rng.uniform(0.01, 0.02, E), jnp.float32))

    def shared(rows, columns):
        codes = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
        codes = np.where(codes & 0x7F == 0x7F, 0, codes).view(ml_dtypes.float8_e4m3fn)
        powers = rng.integers(113, 117, (rows, columns // 32), dtype=np.uint8)
        return MXFP8Tensor(jnp.asarray(codes), jnp.asarray(powers))

    shapes = ((F, D), (F, D), (D, F))
    return (Matrices(*(of(*shape) for shape in shapes)) for of in (routed, shared))


def _loads_alone(load):
    """Teams run one after the other here: each brings all rows."""

    def run(plan, x, rows, groups, _):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(few_tokens, "TEAMS", 1)
            load(plan, x, rows, groups, 0)

    return run


def _emulated(monkeypatch, make_plan, x, ids, operands):
    """The results of a launch, by its programs."""
    plan = make_plan()
    outs = jax.tree.leaves(plan.launch.out)
    results = [np.full(one.shape, np.nan, one.dtype) for one in outs if one.ndim > 1]
    results += [np.full(one.shape, -1, np.int32) for one in outs if one.ndim == 1]
    slots, slabs = TEAMS * plan.ring, plan.eights * plan.launch.columns // 64
    memory = (
        Ref(np.zeros((slots, 2, 2, LINES, LINE), np.uint8)),
        _Codes(np.zeros((slots, few_plan.SLOT // 128, 128), np.uint8)),
    )
    tables = Ref(np.zeros((TEAMS * few_plan.TABLES, 2, 32, 16), np.uint8))
    rows, found = Ref(np.full((slabs, 8, 64), np.nan, BF16)), Ref(np.zeros(64, np.int32))
    barriers = [Ref(np.zeros(count)) for count in (slots, TEAMS * few_plan.TABLES)]
    last = Ref(np.zeros(few_plan.KEPT, np.float32)), None
    refs = [
        Ref(np.array(one)) for one in (x, ids, *operands)
    ]  # copies: arrays of JAX are read-only
    refs += [Ref(one) for one in results]
    refs += [memory, tables, rows, found, *barriers, *last]
    program = lambda *refs: few_tokens._program(make_plan(), *refs)  # noqa: E731
    launch(monkeypatch, MODULES, CTAS, program, *refs, teams=TEAMS)
    return results


@pytest.mark.parametrize("tokens", [3, pytest.param(1, marks=pytest.mark.slow)])  # 5 s
def test_lanes_multiply_tokens_by_their_experts_and_by_the_shared_one(monkeypatch, tokens):
    for module in (few_plan, few_tokens):
        monkeypatch.setattr(module, "TEAMS", TEAMS)
    for module in (few_plan, few_tokens, shared_units):
        monkeypatch.setattr(module, "jnp", np)  # scalars are not traced here
    monkeypatch.setattr(few_tokens, "MULTIPROCESSORS", CTAS)
    monkeypatch.setattr(few_tokens, "_load", _loads_alone(few_tokens._load))
    rng, activation = np.random.default_rng(tokens), Activation()
    x = rng.standard_normal((tokens, D)).astype(BF16)
    experts = jnp.array([[4, 1], [4, E], [1, 1]], jnp.int32)[:tokens]
    ids = np.asarray(experts).reshape(-1)
    routed, shared = _weights()
    gate_up, down = [shared.gate, shared.up], [shared.down, shared.down]
    plans = [
        partial(few_mixture._plan, experts, of, own, activation, jnp.bfloat16)
        for of, own in (([routed.gate, routed.up], gate_up), ([routed.down], down[:1]))
    ]
    operands = few_mixture._operands([routed.gate, routed.up], gate_up)
    hidden, place = _emulated(monkeypatch, plans[0], x, ids, operands)
    operands = few_mixture._operands([routed.down] * 2, down)
    (y,) = _emulated(monkeypatch, plans[1], hidden, ids, operands)
    rows, own = jnp.asarray(x, jnp.float32), y[plans[1]().shared_place :][:tokens]
    nothing = jnp.full((tokens, 1), -1), jnp.zeros((tokens, 1))
    expected = MEANING(rows, routed, *nothing, activation=activation, shared=shared)
    assert_close(own.astype(np.float32), np.asarray(expected), "bf16")
    for pair, at in enumerate(place):
        token, expert = pair // 2, int(ids[pair])
        if expert == E:
            assert at == len(y)
            continue
        one = jnp.full((1, 1), expert), jnp.ones((1, 1))
        expected = MEANING(rows[token : token + 1], routed, *one, activation=activation)
        assert_close(y[at].astype(np.float32), np.asarray(expected)[0], "bf16")


@pytest.mark.parametrize("has_shared", [False, True])
def test_every_unit_is_one_teams_and_the_shared_experts_takes_a_turn(has_shared):
    for count in range(12):
        turns = [few_plan.Turns(count=count, has_shared=has_shared, team=team) for team in range(4)]
        units = [[int(one.unit(i)) for i in range(int(one.own))] for one in turns]
        assert sorted(i for some in units for i in some) == list(range(count))
        had = [len(one) + (has_shared and team == 0) for team, one in enumerate(units)]
        assert count < 3 or max(had) - min(had) <= 1, (count, units)


def _shape(*axes, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(axes, dtype)


def _shapes(experts, width, hidden):
    def pages(rows, columns):
        one = _shape(experts, rows // 32, columns // 128, LINES, LINE, dtype=jnp.uint8)
        return NVFP4Pages(one, _shape(experts, dtype=jnp.float32))

    def dense(rows, columns):
        codes = _shape(rows, columns, dtype=jnp.float8_e4m3fn)
        return MXFP8Tensor(codes, _shape(rows, columns // 32, dtype=jnp.uint8))

    shapes = ((hidden, width), (hidden, width), (width, hidden))
    return (Matrices(*(of(*shape) for shape in shapes)) for of in (pages, dense))


@pytest.mark.parametrize(("tokens", "with_shared"), [(1, True), (8, True), (8, False)])
def test_it_lowers_at_full_width(tokens, with_shared):
    routed, shared = _shapes(128, 6144, 3072)

    def run(x, routed, ids, weights, shared):
        return mosaic.few_tokens(x, routed, ids, weights, Activation(), shared)

    rows = _shape(tokens, 6144, dtype=jnp.bfloat16), routed, _shape(tokens, 4)
    weights = _shape(tokens, 4, dtype=jnp.float32)
    traced = jax.jit(run).trace(*rows, weights, shared if with_shared else None)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "few_tokens_gate_up" in text and "few_tokens_down" in text


def test_what_they_do_not_take_is_said():
    routed, shared = _shapes(8, 512, 1024)
    wide, _ = _shapes(8, 512, 3584)
    said = few_mixture.refuse(jnp.zeros((8, 512), jnp.bfloat16), wide, 32, None)
    assert said == "3584 columns, no multiple of 256 up to 3072"

    def reason(tokens=8, dtype=jnp.bfloat16, pairs=32, shared: Any = shared):
        x = jnp.zeros((tokens, 512), dtype)
        return str(few_mixture.refuse(x, routed, pairs, shared))

    assert reason() == "None"
    assert "9 tokens" in reason(tokens=9)
    assert "with 33 experts in all" in reason(pairs=33)
    assert "float16" in reason(dtype=jnp.float16)
    assert reason(dtype=jnp.float16, shared=None) == "None"
    assert "not MXFP8" in reason(shared=routed)
    assert "not as large" in reason(shared=next(reversed([*_shapes(8, 512, 512)])))
