"""The jitted steps of a drafter's training: what the target says of a pack, one update on blocks of
drafts, and the same measured.

The target is frozen and runs as it is served; so do embedding and head. The drafter's weights are
seen as its folder will store them, its context as the draft cache will give it back (both with
straight-through gradients).
"""

from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from configs.drafter_training import DrafterTrainingConfig
from configs.model import ModelConfig
from configs.parts import DrafterConfig
from minimax_jax.cache import CacheFormats, PoolLayout, pool_layout
from minimax_jax.drafter import Drafter
from minimax_jax.lora import Adapter
from minimax_jax.model import Model
from minimax_jax.quantize import fake_quantize_model
from minimax_jax.speculative.packed import ContextKeys, packed_context, packed_hidden
from rl.draft_anchors import NO_ANCHOR, DraftBlocks
from rl.draft_losses import LossSums, Rows, loss_sums, metrics_of, total_loss
from rl.optimizer import Metrics, Parameters, Structure, TrainState, make_optimizer
from rl.packing import Pack

FORMAT = "m3.1"  # of the folder that training ends in
MAX_GATHERED = 1 << 26  # float32 values of the windows' keys at once, 256 MiB


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Captured:
    """The target on a pack: the residual streams that the drafter taps, and the normed stream of
    which the head's logits are its answer.
    """

    taps: tuple[Float[Array, "B Z D"], ...]
    normed: Float[Array, "B Z D"]


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a step is compiled for: equal programs share one compilation. `model` has the drafter,
    `formats` are those of the target's cache and the draft's.
    """

    model: ModelConfig
    config: DrafterTrainingConfig
    formats: CacheFormats

    @property
    def layout(self) -> PoolLayout:
        """How the cache will store keys and values."""
        return pool_layout(self.model, self.formats)

    @property
    def structure(self) -> Structure[Drafter]:
        """The names of the parameters and their place in the drafter."""
        return _structure(self)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The run's optimiser."""
        return make_optimizer(self.config)

    def new_drafter(self) -> Drafter:
        """A drafter with random weights."""
        return Drafter(self.model, nnx.Rngs(self.config.seed))

    def seen(self, parameters: Parameters) -> Drafter:
        """The drafter as it will be stored, in float arrays."""
        return fake_quantize_model(self.structure.model(parameters), FORMAT)


@cache
def _structure(program: Program) -> Structure[Drafter]:
    return Structure.of(jax.eval_shape(program.new_drafter))


def new_state(program: Program) -> TrainState:
    """The state before the first step."""
    return TrainState.new(program.structure.parameters(program.new_drafter()), program.optimizer)


@partial(jax.jit, static_argnames=("program",))
def capture(target: Model, adapter: Adapter, pack: Pack, program: Program) -> Captured:
    """Runs the target on a pack."""
    assert program.model.drafter is not None
    layers = program.model.drafter.target_layers
    hidden, _, taps = target.hidden(pack.batch, program.layout, None, adapter, taps=layers)
    return Captured(taps=tuple(taps), normed=target.norm(hidden))


@partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def train_step(
    state: TrainState,
    target: Model,
    pack: Pack,
    captured: Captured,
    anchors: Int[Array, "A"],
    program: Program,
) -> tuple[TrainState, Metrics]:
    """One update on the blocks at these anchors."""

    def loss(parameters: Parameters):
        sums = block_sums(program.seen(parameters), target, pack, captured, anchors, program)
        return total_loss(sums, program.config), sums

    (value, sums), grads = jax.value_and_grad(loss, has_aux=True)(state.parameters)
    norm = optax.tree.norm(grads)
    metrics = {"loss": value, **metrics_of(sums), "gradient_norm": norm}
    metrics["tokens"] = jnp.sum(pack.positions >= 0).astype(jnp.float32)
    return state.updated(grads, program.optimizer), metrics


@partial(jax.jit, static_argnames=("program",))
def measure(
    parameters: Parameters,
    target: Model,
    pack: Pack,
    captured: Captured,
    anchors: Int[Array, "A"],
    program: Program,
) -> LossSums:
    """The sums over the blocks at these anchors."""
    return block_sums(program.seen(parameters), target, pack, captured, anchors, program)


def block_sums(
    drafter: Drafter,
    target: Model,
    pack: Pack,
    captured: Captured,
    anchors: Int[Array, "A"],
    program: Program,
) -> LossSums:
    """The losses of all blocks, a chunk at a time, so that neither the gathered windows nor [A, T,
    V] logits ever exist at once.
    """
    keys = packed_context(drafter, captured.taps, pack.batch, program.formats)
    chunk = min(len(anchors), _most_blocks(drafter.config))
    padded = jnp.pad(anchors, (0, -len(anchors) % chunk), constant_values=NO_ANCHOR)

    @jax.checkpoint  # computed again in the backward pass
    def sums(chunk_anchors: Int[Array, "a"]) -> LossSums:
        blocks = DraftBlocks.of(pack, chunk_anchors, drafter.config.draft_block)
        rows = _rows(drafter, target, blocks, keys, captured, program)
        return loss_sums(rows, program.config.loss_decay)

    parts = jax.lax.map(sums, padded.reshape(-1, chunk))
    return jax.tree.map(lambda part: jnp.sum(part, axis=0), parts)


def _most_blocks(config: DrafterConfig) -> int:
    """How many blocks may gather their windows at once."""
    window = config.window * config.attention.num_kv_heads * config.attention.head_dim
    return max(1, MAX_GATHERED // window)


def _rows(
    drafter: Drafter,
    target: Model,
    blocks: DraftBlocks,
    keys: list[ContextKeys],
    captured: Captured,
    program: Program,
) -> Rows:
    """Both models' answers for some blocks; previous tokens are the true ones."""
    x = target.embedded(drafter.block(blocks.previous[:, 0]))
    table, positions = blocks.block_table, blocks.positions
    hidden = packed_hidden(drafter, x, keys, table, positions, program.formats)
    embedded = drafter.markov.embedded(blocks.previous)
    normed_TD = captured.normed.reshape(-1, captured.normed.shape[-1])
    head = drafter.confidence
    return Rows(
        draft=target.headed(hidden) + drafter.markov(embedded),
        target=target.headed(normed_TD[blocks.teachers]),
        labels=blocks.labels,
        valid=blocks.valid,
        confidence=None if head is None else head(hidden, embedded),
    )
