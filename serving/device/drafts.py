"""What a drafter proposes for slots: first after a prompt, then in every speculative step."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from minimax_jax.cache import Cache
from minimax_jax.drafter import Drafter
from minimax_jax.loaded import LoadedModel
from minimax_jax.model import Model
from minimax_jax.sampling import SamplingState
from minimax_jax.speculative.drafting import DraftMethod, Proposal, draft_sampling, propose
from minimax_jax.speculative.setup import Speculation
from serving.device.placement import on_each_rank
from serving.device.slots import Slots, anchors_of, put, tables_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Drafted:
    """B rows' drafts of the tokens after the newest one, and the logits of the confidence head,
    None where there is no head.
    """

    tokens: Int[Array | np.ndarray, "B T"]
    confidence: Float[Array | np.ndarray, "B T"] | None

    @classmethod
    def of(cls, proposal: Proposal) -> "Drafted":
        """Without the distributions, which stay on the device."""
        return cls(tokens=proposal.tokens, confidence=proposal.confidence)


def no_proposal(model: Model, drafter: Drafter, num_slots: int) -> Proposal:
    """Drafts that mean nothing, in the places of real ones."""
    T, V = drafter.config.draft_block, model.config.vocab_size
    confidence = None if drafter.confidence is None else jnp.zeros((num_slots, T))
    return Proposal(
        tokens=jnp.zeros((num_slots, T), jnp.int32),
        logits=jnp.zeros((num_slots, T, V), model.dtype),
        confidence=confidence,
    )


def first_drafts(
    model: Model,
    drafter: Drafter,
    cache: Cache,
    slots: Slots,
    at: Int[Array, "R"],
    pages: int,
    method: DraftMethod,
) -> tuple[Slots, Drafted]:
    """The slots with drafts after the anchors of these, which their prompts left; of the rows of
    all ranks.
    """
    anchors = anchors_of(slots, at)
    settings = replace(slots.sampling, edits=None, penalties=None)
    sampling = on_each_rank(SamplingState.at)(settings, at)
    proposal = propose(
        model,
        drafter,
        cache,
        tables_of(cache, slots, at, pages),
        jnp.where(anchors.running, anchors.tokens, 0),
        jnp.where(anchors.running, anchors.positions, -1),
        draft_sampling(sampling, method),
    )
    slots = replace(slots, proposal=on_each_rank(put)(slots.proposal, at, proposal))
    return slots, Drafted.of(proposal)


def speculation_of(loaded: LoadedModel, num_drafts: int) -> Speculation | None:
    """What speculates, None if no drafts are to be tested; ValueError if that cannot be."""
    if num_drafts == 0:
        return None
    if loaded.speculation is None:
        raise ValueError(
            f"num_speculative_tokens={num_drafts}, but the model is loaded without its drafter"
        )
    most = loaded.speculation.drafter.config.draft_block
    if num_drafts > most:
        raise ValueError(f"num_speculative_tokens={num_drafts} is more than the drafter's {most}")
    return loaded.speculation
