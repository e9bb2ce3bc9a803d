"""One jitted supervised step: the language-model loss through the stored formats, the indexer's own
loss, AdamW, balance.

Weights are seen as the M3.1 checkpoint will store them and keys and values as the NVFP4 cache will
(both with straight-through gradients), so what is trained is what will run.
"""

from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float

from configs.model import ModelConfig
from configs.sft import SFTConfig
from minimax_jax.cache import CacheFormats, PoolLayout, pool_layout
from minimax_jax.context import Context
from minimax_jax.model import Model
from minimax_jax.quantize import fake_quantize_model
from rl.cross_entropy import token_losses
from rl.expert_balance import balanced_bias, expert_loads
from rl.indexer_loss import Queries, indexer_loss
from rl.optimizer import Metrics, Parameters, Structure, TrainState, make_optimizer
from rl.packing import Pack

FORMAT = "m3.1"  # of the checkpoint that training ends in
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the step is compiled for: equal programs share one compilation."""

    model: ModelConfig
    config: SFTConfig
    every_block: bool = False  # attention sees all blocks, whatever the indexer will choose later

    @property
    def layout(self) -> PoolLayout:
        """How the cache will store keys and values: as the model's quantisation names."""
        stored = self.model.quantization
        assert stored.kv_cache is not None and stored.index_cache is not None
        formats = CacheFormats(kv=stored.kv_cache, index=stored.index_cache)
        return pool_layout(self.model, formats)

    @property
    def structure(self) -> Structure[Model]:
        """The names of the parameters and their place in the model."""
        return _structure(self)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The run's optimiser."""
        return make_optimizer(self.config)

    def new_model(self) -> Model:
        """A model with random weights."""
        model = self.model
        if self.every_block:
            blocks = -(-model.max_context // model.indexer.block_size)
            model = replace(model, indexer=replace(model.indexer, top_k=blocks))
        dtype = DTYPES[self.config.dtype]
        return Model(model, nnx.Rngs(self.config.seed), dtype=dtype)

    def seen(self, parameters: Parameters) -> Model:
        """The model as it will be stored, in float arrays."""
        return fake_quantize_model(self.structure.model(parameters), FORMAT)


@cache
def _structure(program: Program) -> Structure[Model]:
    return Structure.of(jax.eval_shape(program.new_model))


def new_state(program: Program) -> TrainState:
    """The state before the first step."""
    return TrainState.new(program.structure.parameters(program.new_model()), program.optimizer)


@partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def train_step(state: TrainState, pack: Pack, program: Program) -> tuple[TrainState, Metrics]:
    """One update on one pack."""
    key = jax.random.fold_in(jax.random.key(program.config.seed), state.step)
    grad = jax.value_and_grad(_loss, has_aux=True)
    (_, (metrics, loads)), grads = grad(state.parameters, pack, key, program)
    state = state.updated(grads, program.optimizer)
    for layer, load in loads.items():
        name = f"layers.{layer}.mlp.router.bias"
        bias, rate = state.parameters[name], program.config.router_bias_rate
        state.parameters[name] = balanced_bias(bias, load, rate)
    metrics["gradient_norm"] = optax.tree.norm(grads)
    return state, metrics


@partial(jax.jit, static_argnames=("program",))
def measure(parameters: Parameters, pack: Pack, program: Program) -> Float[Array, "3"]:
    """Sums over a pack: loss, right tokens and counted tokens, each next token predicted from the
    true ones before it.
    """
    model = program.seen(parameters)
    hidden, _, _ = model.hidden(pack.batch, program.layout)
    loss, hits = token_losses(model, hidden, pack.targets, pack.weights)
    return jnp.stack([loss, hits, jnp.sum(pack.weights)])


@partial(jax.jit, static_argnames=("program",))
def seen_model(parameters: Parameters, program: Program) -> Model:
    """`Program.seen`, compiled."""
    return program.seen(parameters)


def _loss(parameters: Parameters, pack: Pack, key: Array, program: Program):
    config, layout = program.config, program.layout
    model = program.seen(parameters)
    batch = pack.batch
    layers = range(model.config.num_layers)
    hidden, _, streams = model.hidden(batch, layout, taps=layers)
    embedded = model.embedded(batch.tokens)
    inputs = [jax.lax.stop_gradient(x) for x in (embedded, *streams[:-1])]
    context = Context.of(batch, model.config, layout)
    queries = Queries.sample(key, batch, config.indexer_queries)
    indexer = indexer_loss(model, inputs, context, queries, program.model.indexer)
    loads = expert_loads(model, inputs, context)
    total, hits = token_losses(model, hidden, pack.targets, pack.weights)
    counted = jnp.maximum(jnp.sum(pack.weights), 1.0)
    loss = total / counted
    metrics = {
        "loss": loss,
        "accuracy": hits / counted,
        "indexer_loss": indexer.loss,
        "looked": indexer.looked,
        "caught": indexer.caught,
        "busiest_expert": jnp.max(jnp.stack([jnp.max(load) for load in loads.values()] or [1.0])),
        "tokens": jnp.sum(pack.positions >= 0).astype(jnp.float32),
    }
    return loss + config.indexer_weight * indexer.loss, (metrics, loads)
