"""The drafter's two small heads: a low-rank Markov bias on the next token's logits, and the
confidence that a draft will be accepted (spec/dspark 1.3 g-h).
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from minimax_jax.layers import Linear, normal


class MarkovHead(nnx.Module):
    """Bias W2 W1[previous token]. A new one has W2 = 0: it changes nothing until it is trained.

    W1 is whole on every device: its rows are looked up once a drafted token. W2 is split as the
    target's head is, so that the bias lies where the logits are.
    """

    def __init__(self, vocab_size: int, rank: int, rngs: nnx.Rngs):
        self.w1 = nnx.Param(normal(rngs, vocab_size, rank), axes=(None, None))
        self.w2 = Linear(vocab_size, rank, ("vocab", None), rngs)
        self.w2.weight.set_value(jnp.zeros((vocab_size, rank)))

    def embedded(self, previous: Int[Array, "*rows"]) -> Float[Array, "*rows R"]:
        """W1's row of each token; the confidence head sees it, too."""
        return self.w1.get_value()[previous]

    def __call__(self, embedded: Float[Array, "*rows R"]) -> Float[Array, "*rows V"]:
        """The bias in float32."""
        return self.w2.float32(embedded)


class ConfidenceHead(nnx.Module):
    """w . [hidden, Markov embedding] + b in float32, whatever the weights' dtype: a logit."""

    def __init__(self, dim: int, rank: int, rngs: nnx.Rngs):
        self.weight = nnx.Param(normal(rngs, 1, dim + rank), axes=(None, None))
        self.bias = nnx.Param(jnp.zeros(1), axes=(None,))

    def __call__(
        self, hidden: Float[Array, "*rows D"], embedded: Float[Array, "*rows R"]
    ) -> Float[Array, "*rows"]:
        both = jnp.concatenate([x.astype(jnp.float32) for x in (hidden, embedded)], axis=-1)
        weight = self.weight.get_value()[0].astype(jnp.float32)
        return jnp.dot(both, weight, precision="highest") + self.bias.get_value().astype(
            jnp.float32
        )
