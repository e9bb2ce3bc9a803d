"""window_attention: the drafter's attention: a sliding window of context pages plus its own block,
both ways.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.layouts.pages import Source
from pallas_kernels.window_attention import hopper, reference

TABLE = (
    Implementation("hopper", hopper.window_attention, hopper.refuse),
    Implementation("reference", reference.window_attention),
)


def window_attention(
    q: Float[Array, "B T N H"],
    k: Source,
    v: Source,
    block_k: Float[Array, "B T K H"],
    block_v: Float[Array, "B T K H"],
    block_table: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    *,
    window: int,
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of T draft queries at positions length .. length + T - 1 (spec/dspark 1.3 e).

    Query i sees context keys at positions (length + i - window, length) and all T keys of its own
    block, later ones too. The block's keys are operands and never enter the pages. A tile of length
    -1 is padding and sees its own block only.
    """
    args = (q, k, v, block_k, block_v, block_table, lengths)
    options = {"window": window, "scale": scale}
    return choose(TABLE, implementation, *args, **options).run(*args, **options)
