"""Collectives of a program's text: their kinds, groups, bytes and how often a run meets them."""

import pytest

from minimax_jax.plan.hlo import collectives

TEXT = """HloModule jit_step

%add (a: bf16[], b: bf16[]) -> bf16[] {
  ROOT %sum = bf16[] add(%a, %b)
}

%layer (x: bf16[8,64]) -> bf16[8,64] {
  %y = bf16[8,64]{1,0} all-reduce(%x), replica_groups={{0,1,2,3}}, metadata={op_name="psum"}
  ROOT %z = bf16[2,64]{1,0} reduce-scatter(%y), replica_groups=[2,4]<=[8], dimensions={0}
}

%more (n: s32[]) -> pred[] {
  %end = s32[] constant(3)
  ROOT %less = pred[] compare(%n, %end), direction=LT
}

%round (n: s32[]) -> s32[] {
  %codes = (u8[4,64]{1,0}, u8[4,2]{1,0}) all-to-all(%a, %b), replica_groups=mesh['a'=2,'b'=4] {'b'}
}

ENTRY %main (x: bf16[8,64]) -> bf16[8,64] {
  %c = bf16[8,64]{1,0} call(%x), to_apply=%layer, metadata={op_name="jit(step)/layer"}
  %w = s32[] while(%n), condition=%more, body=%round, metadata={op_name="jit(step)/loop"}
  ROOT %g = f32[16,4]{1,0} all-gather(%c), replica_groups={{0,1},{2,3}}, dimensions={0}
}
"""


def test_every_collective_has_its_bytes_and_its_place():
    found = [(one.kind, one.ranks, one.nbytes, one.scope) for one in collectives(TEXT)]
    assert found == [
        ("all-reduce", 4, 8 * 64 * 2 * 2 * 3 / 4, "jit(step)/layer/psum"),
        ("reduce-scatter", 4, 2 * 64 * 2 * 3, "jit(step)/layer"),
        ("all-to-all", 4, 3 * (4 * 64 + 4 * 2) * 3 / 4, "jit(step)/loop"),
        ("all-gather", 2, 16 * 4 * 4 / 2, ""),
    ]


def test_a_collective_in_a_loop_of_unknown_length_is_refused():
    with pytest.raises(
        ValueError, match="^all-to-all of jit\\(step\\)/loop is in a loop of unknow"
    ):
        collectives(TEXT.replace("constant(3)", "parameter(1)"))


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        collectives("HloModule m")
