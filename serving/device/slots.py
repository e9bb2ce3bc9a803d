"""What the device keeps of each slot between steps, and the small updates that a plan brings.

S slots; a row of a step names its slot, and S itself names none: what is written there is dropped.
A plan sends what changed alone, so a step of running sequences costs the host a few numbers a row.
All this is of one data rank; `placement` says how the slots of several lie together.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from minimax_jax.cache import Cache
from minimax_jax.sampling import History, SamplingState
from minimax_jax.sampling.edits import Edits
from minimax_jax.sampling.masks import BITS
from minimax_jax.sampling.penalties import Penalties
from minimax_jax.speculative.commit import Anchors
from minimax_jax.speculative.drafting import Proposal
from serving.device.limits import LIMITS
from serving.device.placement import on_each_rank

Sent = Any  # an array of the host outside a step, one of the device within
ALL_BITS = 0xFFFFFFFF


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Slots:
    """S sequences between two steps. Nothing of a slot means anything before its admission.

    Edits and penalties are always there, neutral where nobody asked; a step skips them when none of
    its rows asked (`sampler.Asks`).
    """

    tables: Int[Array, "S P"]
    anchors: Anchors
    sampling: SamplingState
    history: History
    proposal: Proposal | None = None  # the drafts after each anchor; None without a drafter

    @classmethod
    def empty(cls, num_slots: int, num_pages: int, vocab_size: int) -> "Slots":
        """No sequences."""
        S, V = num_slots, vocab_size
        ids = jnp.zeros(S, jnp.int32)
        return cls(
            tables=jnp.full((S, num_pages), -1, jnp.int32),
            anchors=Anchors(
                tokens=ids, positions=ids + 0, limits=ids + 0, running=jnp.zeros(S, bool)
            ),
            sampling=SamplingState(
                temperature=jnp.zeros(S),
                top_p=jnp.ones(S),
                top_k=ids + 0,
                min_p=jnp.zeros(S),
                seed=jnp.zeros((S, 2), jnp.uint32),
                stop_ids=jnp.full((S, LIMITS.stop_ids), -1, jnp.int32),
                edits=neutral_edits(S, V),
                penalties=Penalties(
                    repetition=jnp.ones(S), frequency=jnp.zeros(S), presence=jnp.zeros(S)
                ),
            ),
            history=History(
                prompt=jnp.zeros((S, V), bool),
                counts=jnp.zeros((S, V), jnp.int32),
                recent=jnp.full((S, LIMITS.word_length - 1), -1, jnp.int32),
            ),
        )

    @property
    def num_slots(self) -> int:
        """S, of all ranks together where there are several."""
        return self.tables.shape[0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Admitted:
    """R sequences that come into slots, each with its settings; unused rows have slot S."""

    slots: Int[Sent, "R"]
    limits: Int[Sent, "R"]
    temperature: Float[Sent, "R"]
    top_p: Float[Sent, "R"]
    top_k: Int[Sent, "R"]
    min_p: Float[Sent, "R"]
    seed: UInt32[Sent, "R 2"]
    stop_ids: Int[Sent, "R stops"]

    def sampling(self, **others: Any) -> SamplingState:
        """The state of these sequences, all that has a name here from here."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        del own["slots"], own["limits"]
        return SamplingState(**own, **others)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class EditsRow:
    """The edits of one sequence, and the last of the tokens that it has generated already."""

    slot: Int[Sent, "1"]
    allowed: UInt32[Sent, "1 packed"]
    words: Int[Sent, "1 words length"]
    stops_from: Int[Sent, "1"]
    bias_ids: Int[Sent, "1 biases"]
    biases: Float[Sent, "1 biases"]
    recent: Int[Sent, "1 n"]

    @property
    def edits(self) -> Edits:
        """As those of a batch of one."""
        return Edits(
            allowed=self.allowed,
            words=self.words,
            stops_from=self.stops_from,
            bias_ids=self.bias_ids,
            biases=self.biases,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PenaltiesRow:
    """The penalties of one sequence, which ids its prompt has (packed bits), and how often it has
    generated each.
    """

    slot: Int[Sent, "1"]
    repetition: Float[Sent, "1"]
    frequency: Float[Sent, "1"]
    presence: Float[Sent, "1"]
    prompt: UInt32[Sent, "1 packed"]
    counts: Int[Sent, "1 V"]

    @property
    def penalties(self) -> Penalties:
        """As those of a batch of one."""
        return Penalties(
            repetition=self.repetition, frequency=self.frequency, presence=self.presence
        )


def tables_of(cache: Cache, slots: Slots, at: Int[Array, "B"], pages: int) -> Int[Array, "B P"]:
    """The block tables of these slots, on all ranks, as far as the first `pages` entries say: rows
    of the pool, each of one block or more.
    """
    rows = on_each_rank(lambda tables, at: tables[at, :pages])(slots.tables, at)
    return cache.blocks_of(rows)


def anchors_of(slots: Slots, at: Int[Array, "B"]) -> Anchors:
    """The anchors of these slots, on all ranks; those of nobody do not run."""
    return on_each_rank(_anchors)(slots.anchors, at)


def _anchors(anchors: Anchors, at: Int[Array, "B"]) -> Anchors:
    found, S = jax.tree.map(lambda x: x[at], anchors), len(anchors.running)
    return replace(found, running=found.running & (at < S))


def admit(slots: Slots, new: Admitted) -> Slots:
    """The slots with new sequences, which run nothing before their prompts have ended."""
    at, R = new.slots, len(new.slots)
    vocab_size = slots.history.counts.shape[1]  # type: ignore[union-attr]
    neutral = neutral_edits(R, vocab_size)
    ones, zeros = jnp.ones(R), jnp.zeros(R)
    sampling = new.sampling(
        edits=neutral, penalties=Penalties(repetition=ones, frequency=zeros, presence=zeros)
    )
    anchors = Anchors(
        tokens=jnp.zeros(R, jnp.int32),
        positions=jnp.zeros(R, jnp.int32),
        limits=new.limits,
        running=jnp.zeros(R, bool),
    )
    return replace(
        slots,
        tables=slots.tables.at[at].set(-1, mode="drop"),
        anchors=put(slots.anchors, at, anchors),
        sampling=put(slots.sampling, at, sampling),
    )


def set_blocks(slots: Slots, entries: Int[Array, "N 3"]) -> Slots:
    """The slots with block-table entries (slot, index, block); unused ones have slot S."""
    slot, index, block = entries.T
    return replace(slots, tables=slots.tables.at[slot, index].set(block, mode="drop"))


def set_edits(slots: Slots, row: EditsRow) -> Slots:
    """The slots with one sequence's edits."""
    at = row.slot
    assert slots.history.recent is not None
    recent = slots.history.recent.at[at].set(row.recent, mode="drop")
    return replace(
        slots,
        sampling=replace(slots.sampling, edits=put(slots.sampling.edits, at, row.edits)),
        history=replace(slots.history, recent=recent),
    )


def set_penalties(slots: Slots, row: PenaltiesRow) -> Slots:
    """The slots with one sequence's penalties and what they count."""
    at, history = row.slot, slots.history
    assert history.prompt is not None and history.counts is not None
    penalties = put(slots.sampling.penalties, at, row.penalties)
    history = replace(
        history,
        prompt=history.prompt.at[at].set(_bits(row.prompt, row.counts.shape[1]), mode="drop"),
        counts=history.counts.at[at].set(row.counts, mode="drop"),
    )
    return replace(slots, sampling=replace(slots.sampling, penalties=penalties), history=history)


def set_masks(
    masks: UInt32[Array, "S places words"],
    at: Int[Array, "M"],
    new: UInt32[Array, "M places words"],
) -> UInt32[Array, "S places words"]:
    """The grammars' masks of all slots with M new ones; unused rows have slot S."""
    return masks.at[at].set(new, mode="drop")


def put(tree, at: Int[Array, "R"], rows):
    """A tree of arrays [S, ...] with `rows`, [R, ...], in these places."""
    return jax.tree.map(lambda x, row: x.at[at].set(row.astype(x.dtype), mode="drop"), tree, rows)


def neutral_edits(num_rows: int, vocab_size: int) -> Edits:
    """Edits that change nothing."""
    words = (num_rows, LIMITS.words, LIMITS.word_length)
    return Edits(
        allowed=jnp.full((num_rows, -(-vocab_size // BITS)), ALL_BITS, jnp.uint32),
        words=jnp.full(words, -1, jnp.int32),
        stops_from=jnp.zeros(num_rows, jnp.int32),
        bias_ids=jnp.full((num_rows, LIMITS.biases), -1, jnp.int32),
        biases=jnp.zeros((num_rows, LIMITS.biases)),
    )


def _bits(packed: UInt32[Array, "1 packed"], size: int) -> Bool[Array, "1 V"]:
    bits = packed[..., None] >> jnp.arange(BITS, dtype=jnp.uint32) & 1
    return bits.reshape(1, packed.shape[1] * BITS)[:, :size] == 1
