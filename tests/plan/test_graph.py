"""What may run beside a collective, from a program's text."""

from minimax_jax.plan.graph import all_work, work_beside

# One chain: a product in a call, its sum over the ranks, a loop of three products on the sum. And
# one product that is none of the chain's, though it leaves the call in the same tuple.
TEXT = """HloModule jit_step

%layer (x: f32[8,64], w: f32[64,16], v: f32[64,32]) -> (f32[8,16], f32[8,32]) {
  %x = f32[8,64]{1,0} parameter(0)
  %w = f32[64,16]{1,0} parameter(1)
  %v = f32[64,32]{1,0} parameter(2)
  %y = f32[8,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %s = f32[8,16]{1,0} all-reduce(%y), replica_groups={{0,1}}, to_apply=%add
  %z = f32[8,32]{1,0} dot(%x, %v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %both = (f32[8,16]{1,0}, f32[8,32]{1,0}) tuple(%s, %z)
}

%body (a: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %a = (s32[], f32[8,16]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%a), index=0
  %t = f32[8,16]{1,0} get-tuple-element(%a), index=1
  %g = f32[16,16]{1,0} dot(%t, %t), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  ROOT %more = (s32[], f32[8,16]{1,0}) tuple(%n, %t)
}

ENTRY %main (x: f32[8,64], w: f32[64,16], v: f32[64,32]) -> f32[8,16] {
  %x.1 = f32[8,64]{1,0} parameter(0)
  %w.1 = f32[64,16]{1,0} parameter(1)
  %v.1 = f32[64,32]{1,0} parameter(2)
  %c = (f32[8,16]{1,0}, f32[8,32]{1,0}) call(%x.1, %w.1, %v.1), to_apply=%layer
  %s.1 = f32[8,16]{1,0} get-tuple-element(%c), index=0
  %z.1 = f32[8,32]{1,0} get-tuple-element(%c), index=1
  %zero = s32[] constant(0)
  %init = (s32[], f32[8,16]{1,0}) tuple(%zero, %s.1)
  %loop = (s32[], f32[8,16]{1,0}) while(%init), body=%body, c={"known_trip_count":{"n":"3"}}
  %q = f32[8,16]{1,0} get-tuple-element(%loop), index=1
  %last = f32[8,16]{1,0} all-reduce(%q), replica_groups={{0,1}}, to_apply=%add
  ROOT %out = (f32[8,16]{1,0}, f32[8,32]{1,0}) tuple(%last, %z.1)
}
"""
OTHER, CHAIN = 2 * 8 * 64 * 32, 2 * 8 * 64 * 16 + 3 * 2 * 16 * 16 * 8


def test_work_that_waits_or_is_waited_for_is_not_beside():
    assert work_beside(TEXT) == [OTHER, OTHER]
    assert all_work(TEXT) == OTHER + CHAIN


def test_what_a_loop_exchanges_is_seen_with_one_round_of_it():
    text = TEXT.replace(
        "%g = f32", "%o = f32[8,16]{1,0} all-reduce(%t), replica_groups={{0,1}}\n  %g = f32"
    )
    one_round = 2 * 16 * 16 * 8  # of the product, for which nothing waits
    assert work_beside(text) == [OTHER, OTHER + one_round, OTHER + one_round]
