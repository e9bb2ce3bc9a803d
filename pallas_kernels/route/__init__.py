"""route: the experts that each token goes to, and how much each of them counts.

s = sigmoid(W x)                       float32
the X experts of the largest s + bias  (equal: the lower id)
weights = their s / sum of their s * scale
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.route import mosaic, reference

TABLE = (
    Implementation("mosaic", mosaic.route, mosaic.refuse),
    Implementation("reference", reference.route),
)


def route(
    x: Float[Array, "*rows D"],
    gate: Float[Array, "E D"],
    bias: Float[Array, "E"],
    *,
    count: int,
    scale: float,
    one_device: bool = True,
    implementation: str | None = None,
) -> tuple[Int[Array, "*rows X"], Float[Array, "*rows X"]]:
    """Ids of the `count` experts of each row, the best first, and their weights, whose sum is
    `scale`. Gradients reach x and the gate through the weights, none the choice.

    `one_device` is False where the compiler partitions what is traced.
    """
    options = {"count": count, "scale": scale, "one_device": one_device}
    return choose(TABLE, implementation, x, gate, bias, **options).run(x, gate, bias, **options)
