"""The end of the backward kernel: dk and dv of the pieces of a block are added, one behind the
other.

Grid: KV heads x blocks x `_SHARES` parts of a block, a warpgroup each; a thread has 4 neighbouring
dimensions of `_TOKENS` tokens. Memory: 128 KB a piece read, as much a block written.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import lanes

_SHARES, _TOKENS = 16, 8  # together 128
_STEP = 128 * 4 * 4  # bytes of the four tokens that a warpgroup reads at once


def add(
    parts: Float[Array, "K n 2 Z H"], starts: Int[Array, "K P"], counts: Int[Array, "K P"]
) -> Float[Array, "2 P Z K H"]:
    """The sums of `counts` pieces from `starts` on, for each head and block; Z = H = 128."""
    K, P = starts.shape
    Z, H = parts.shape[3:]
    assert Z == H == 128, parts.shape
    kernel = plgpu.kernel(
        lanes.named("add_pieces", _program),
        out_type=jax.ShapeDtypeStruct((2, P, Z, K, H), jnp.float32),
        grid=(K, P, _SHARES),
        grid_names=("head", "block", "share"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(parts, starts, counts)


def _program(parts, starts, counts, sums):
    K, P = starts.shape
    n = parts.shape[1]
    head, block = lax.axis_index("head"), lax.axis_index("block")

    @lanes.code(*[lanes.REF] * 2, *[lanes.SCALAR] * 5)
    def run(_, parts, sums, head, block, share, start, count):
        head, block, share, start, count = map(lanes.scalar, (head, block, share, start, count))
        first = head * n + start
        at = (share * _TOKENS << 9) + (lanes.thread() << 4)

        def add_piece(i, *carry):
            piece = lanes.element(lanes.address(parts), first + i, 2 * 128 * 512)
            found = []
            for j in range(_TOKENS // 4):
                for kind in (0, 1):
                    found += lanes.load_reals(piece, at + (kind * 128 * 512 + j * _STEP), 4)
            kept = map(lanes.real_of_bits, carry)
            return [lanes.bits_of_real(x + y) for x, y in zip(kept, found, strict=True)]

        words = lanes.repeat(0, count, 1, add_piece, [lanes.word(0)] * (2 * _TOKENS))
        for i in range(_TOKENS // 2):
            j, kind = divmod(i, 2)
            token = share * _TOKENS + 4 * j + (lanes.thread() >> 5)
            row = ((block + kind * P) * 128 + token) * K + head
            to = lanes.element(lanes.address(sums), row, 512)
            lanes.store_words(to, lanes.lane() << 4, words[4 * i : 4 * i + 4])

    share = lax.axis_index("share")
    run(parts, sums, head, block, share, starts[head, block], counts[head, block])
