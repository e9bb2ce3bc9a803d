"""MiniMax-M3: embedding, decoder layers (attention, then MLP or experts, each behind a Gemma norm),
final norm, head.

One definition, three ways through it: packed without a cache, prefill into pages, decode from
pages. The layers are walked by a plain loop over one jitted block, so that a kind of layer is
traced once; what differs by layer is passed in.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

from configs.model import ModelConfig
from minimax_jax.attention import Attention
from minimax_jax.batch import Batch
from minimax_jax.cache import Cache
from minimax_jax.context import Context
from minimax_jax.layers import MLP, GemmaNorm, Linear, normal
from minimax_jax.lora import Adapter, part
from minimax_jax.micro_batches import MicroBatches, micro_batches
from minimax_jax.moe import MoE
from minimax_jax.shards import gathered_tokens, own_rows, partial_sums, summed, token_axis
from pallas_kernels.layouts.pool import PoolLayout
from sharding.apply import constrain, local
from sharding.rules import SERVE

MICRO_BATCH = "micro_batch_"  # and its number: the scope of its layers in a step's program


class DecoderLayer(nnx.Module):
    """h += attention(norm(h)); h += mlp(norm(h))."""

    def __init__(self, config: ModelConfig, *, sparse: bool, moe: bool, rngs: nnx.Rngs):
        dim, eps = config.hidden_size, config.norm_eps
        self.input_norm = GemmaNorm(dim, eps)
        self.attention = Attention(config, sparse=sparse, rngs=rngs)
        self.post_attention_norm = GemmaNorm(dim, eps)
        self.mlp = MoE(config, rngs) if moe else MLP(dim, config.mlp.dense_dim, config.mlp, rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        pool: UInt8[Array, "ranks P lines 128"] | None,
        line: Array | int,
        context: Context,
        adapter: Adapter = None,
    ) -> tuple[Float[Array, "B T D"], UInt8[Array, "ranks P lines 128"] | None]:
        x, pool, _ = self.with_choice(x, pool, line, context, adapter, None)
        return x, pool

    def with_choice(
        self,
        x: Float[Array, "B T D"],
        pool: UInt8[Array, "ranks P lines 128"] | None,
        line: Array | int,
        context: Context,
        adapter: Adapter,
        replay: Int[Array, "B T X"] | None,
    ) -> tuple[
        Float[Array, "B T D"], UInt8[Array, "ranks P lines 128"] | None, Int[Array, "B T X"] | None
    ]:
        """The stream, the pool, and the experts that the router chooses (None: there are none)."""
        rules, of_mlp = context.rules, part(adapter, "mlp")
        lies = ("batch", token_axis(x.shape[1], rules), "embed")
        normed = self.input_norm(x)
        with jax.named_scope("attention"):
            of_attention = part(adapter, "attention")
            attended, pool = self.attention(normed, pool, line, context, of_attention)
        x = constrain(x + attended, *lies, rules=rules)
        normed, choice = self.post_attention_norm(x), None
        with jax.named_scope("mlp"):
            if isinstance(self.mlp, MoE):
                y, choice = self.mlp.with_choice(normed, of_mlp, replay, rules)
            else:
                normed, into = gathered_tokens(normed, rules), ("batch", None, "embed")
                y = summed([partial_sums(self.mlp, normed, of_mlp, into=into, rules=rules)], rules)
        return constrain(x + y, *lies, rules=rules), pool, choice


class Walk(NamedTuple):
    """What all layers leave: `Model.walk`."""

    hidden: Float[Array, "B T D"]
    cache: Cache | None
    taps: list[Float[Array, "B T D"]]
    choices: Int[Array, "L B T X"]  # of the layers with experts


class Model(nnx.Module):
    """The decoder. Weights may be stored in any format; activations have `dtype`."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        rows = normal(rngs, config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(rows, axes=("vocab", "embed"))
        kinds = zip(config.sparse_layers, config.moe_layers, strict=True)
        self.layers = nnx.List(
            [DecoderLayer(config, sparse=sparse, moe=moe, rngs=rngs) for sparse, moe in kinds]
        )
        self.norm = GemmaNorm(config.hidden_size, config.norm_eps)
        self.head = Linear(config.vocab_size, config.hidden_size, ("vocab", "embed"), rngs)
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.rules = SERVE  # where weights and activations lie on a mesh; what loads them says so

    def hidden(
        self,
        batch: Batch,
        layout: PoolLayout,
        cache: Cache | None = None,
        adapter: Adapter = None,
        *,
        remat: bool = False,
        taps: Sequence[int] = (),
    ) -> tuple[Float[Array, "B T D"], Cache | None, list[Float[Array, "B T D"]]]:
        """The residual stream after the last layer (before the final norm), the cache, and the
        stream after each tapped layer: `walk` without the experts' part.
        """
        walked = self.walk(batch, layout, cache, adapter, remat=remat, taps=taps)
        return walked.hidden, walked.cache, walked.taps

    def walk(
        self,
        batch: Batch,
        layout: PoolLayout,
        cache: Cache | None = None,
        adapter: Adapter = None,
        *,
        remat: bool = False,
        taps: Sequence[int] = (),
        replay: Int[Array, "L B T X"] | None = None,
        record: UInt8[Array, "P lines 128"] | None = None,
    ) -> Walk:
        """All layers.

        Without a cache the batch's tiles are its own keys (`minimax_jax.batch.pack`). `remat`
        recomputes each layer in the backward pass. With `replay` the layers with experts use those
        ids, and their own choice where it is `NO_ROUTE`. With `record`, of a batch without a cache,
        keys and values are what those pages hold: block b is tile b. A cache that records takes
        down the choices. With a cache a large batch may run as two micro-batches whose layers
        alternate.
        """
        micro = MicroBatches()
        if cache is not None:
            cache.check_shared_out(self.rules.page_ranks)
            micro = micro_batches(batch, layout.block_size, self.rules)
        contexts = [
            Context.of(
                one, self.config, layout, self.rules, alternates=micro.count > 1, record=record
            )
            for one in micro.batches(batch)
        ]
        xs = [self._stream(context.batch.tokens) for context in contexts]
        pool = None if cache is None else cache.pool
        run = jax.checkpoint(_run_layer) if remat else _run_layer
        tapped, choices = {}, []
        for i, layer in enumerate(self.layers):
            line = jnp.int32(layout.layer_line(i))
            replays: list[Array | None] = [None] * micro.count
            if replay is not None and self.config.moe_layers[i]:
                replays = [*micro.parts(replay[len(choices)])]
            of_layer, chosen = part(part(adapter, "layers"), str(i)), []
            for n, (context, ids) in enumerate(zip(contexts, replays, strict=True)):
                with jax.named_scope(f"{MICRO_BATCH}{n}"):
                    xs[n], pool, choice = run(layer, xs[n], pool, line, context, of_layer, ids)
                chosen.append(choice)
            tapped[i] = micro.joined(xs) if i in taps else None
            choices += [micro.joined(chosen)] if self.config.moe_layers[i] else []
        none = (0, *batch.tokens.shape, self.config.moe.experts_per_token)
        choices = jnp.stack(choices) if choices else jnp.zeros(none, int)
        if cache is not None and pool is not None:
            cache = cache.with_pool(pool).with_choices(choices, batch)
        return Walk(micro.joined(xs), cache, [tapped[i] for i in taps], choices)

    def _stream(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The stream before the first layer, where the mesh has it."""
        axis = token_axis(tokens.shape[1], self.rules)
        return constrain(self.embedded(tokens), "batch", axis, "embed", rules=self.rules)

    def embedded(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The residual stream before the first layer; M3 does not scale it."""
        look_up = local(
            own_rows,
            in_axes=[("vocab", None), ("batch", None)],
            out_axes=("batch", None, None),
            rules=self.rules,
        )
        return look_up(self.embedding.get_value(), tokens).astype(self.dtype)

    def logits(
        self, hidden: Float[Array, "*rows D"], adapter: Adapter = None
    ) -> Float[Array, "*rows V"]:
        """float32 logits over all V rows of the head; ids from `config.num_tokens` on are padding,
        -inf.
        """
        return self.headed(self.norm(hidden), adapter)

    def headed(
        self, normed: Float[Array, "*rows D"], adapter: Adapter = None
    ) -> Float[Array, "*rows V"]:
        """`logits` of states that are normed already, as the drafter's are."""
        logits = self.head.float32(normed, part(adapter, "head"))
        padding = jnp.arange(self.config.vocab_size) >= self.config.num_tokens
        return jnp.where(padding, -jnp.inf, logits)


@jax.jit
def _run_layer(layer: DecoderLayer, x, pool, line, context: Context, adapter: Adapter, replay):
    return layer.with_choice(x, pool, line, context, adapter, replay)
