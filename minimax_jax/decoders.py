"""How a wave decodes on the device once its prompts are in the pages: plainly, or speculating.

Both take what the prefill left and give back what each dispatch generated, already on the host.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from configs.speculative import SpeculativeConfig
from minimax_jax.cache import Cache
from minimax_jax.loaded import LoadedModel
from minimax_jax.sampling import SamplingState
from minimax_jax.speculative.steps import (
    Speculated,
    SpeculationOptions,
    SpeculationState,
    speculate,
    start,
)
from minimax_jax.steps import DecodeOptions, DecodeState, Generated, bucket, decode

DECODE_STEPS = 16  # tokens a dispatch
SPECULATIVE_STEPS = 3  # steps a dispatch: with five tokens a step as many tokens as above


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What became of the drafts of B sequences in one step: the confidence logits that they were
    proposed with (None: no head), how many were tested and kept, and who is running after it.
    `num_drafts` are tested where there is room for them.
    """

    num_drafts: int
    confidence: Float[np.ndarray, "B T"] | None
    tested: Int[np.ndarray, "B"]
    accepted: Int[np.ndarray, "B"]
    running: Bool[np.ndarray, "B"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some rows of tokens [k, B], -1 where there is none, and the step that verified them."""

    generated: Generated
    verified: Verified | None = None


@dataclass(frozen=True, kw_only=True)
class Prefilled:
    """Where decoding starts: B sequences whose prompts are in the pages of `table`."""

    loaded: LoadedModel
    cache: Cache
    table: Int[Array, "B P"]
    state: DecodeState
    sampling: SamplingState
    max_tokens: int
    top_logprobs: int


class PlainDecoder:
    """One token of each sequence a step."""

    def __init__(self, prefilled: Prefilled):
        self._in, self._cache, self._state = prefilled, prefilled.cache, prefilled.state
        steps = min(DECODE_STEPS, bucket(prefilled.max_tokens))
        self._options = DecodeOptions(steps=steps, top_logprobs=prefilled.top_logprobs)

    def advance(self) -> list[Part]:
        """One dispatch of several steps."""
        loaded, held = self._in.loaded, self._in
        with loaded.on_mesh():
            self._cache, self._state, generated = decode(
                loaded.model,
                loaded.adapter,
                self._cache,
                held.table,
                self._state,
                held.sampling,
                self._options,
            )
        return [Part(generated=jax.device_get(generated))]

    def keep(self, going: Bool[np.ndarray, "B"]) -> None:
        """Ends the sequences that are not `going`."""
        self._state = replace(self._state, running=self._state.running & jnp.asarray(going))


class SpeculativeDecoder:
    """1 to `num_drafts` + 1 tokens of each sequence a step, all drafts that there is room for
    verified. The first dispatch gives the first token of each alone.
    """

    def __init__(self, prefilled: Prefilled, config: SpeculativeConfig):
        """`config` is how this model's drafter is used."""
        assert prefilled.loaded.drafter is not None
        self._drafter = prefilled.loaded.drafter
        self._num_drafts = config.verified(self._drafter.config.draft_block)
        num_rows = len(prefilled.table)
        self._in, self._cache = prefilled, prefilled.cache
        self._widths = jnp.full(num_rows, self._num_drafts, jnp.int32)
        self._state: SpeculationState | None = None
        self._options = SpeculationOptions(
            rows=num_rows * (self._num_drafts + 1),
            method=config.draft_sample_method,
            top_logprobs=prefilled.top_logprobs,
        )

    def advance(self) -> list[Part]:
        """The first tokens, then each time a few steps that are queued together."""
        with self._in.loaded.on_mesh():
            if self._state is None:
                self._state, generated = self._start()
                first = jax.tree.map(lambda one: one[None], jax.device_get(generated))
                return [Part(generated=first)]
            queued = [self._step() for _ in range(SPECULATIVE_STEPS)]
        return [self._part(*one) for one in jax.device_get(queued)]

    def keep(self, going: Bool[np.ndarray, "B"]) -> None:
        """Ends the sequences that are not `going`."""
        assert self._state is not None
        anchors = self._state.anchors
        anchors = replace(anchors, running=anchors.running & jnp.asarray(going))
        self._state = replace(self._state, anchors=anchors)

    def _start(self) -> tuple[SpeculationState, Generated]:
        held, loaded = self._in, self._in.loaded
        return start(
            loaded.model,
            self._drafter,
            self._cache,
            held.table,
            held.state,
            held.sampling,
            self._options,
        )

    def _step(self) -> tuple[Array | None, Speculated, Array]:
        """One step: the confidences before it, what it gave, and who runs after it, on the
        device.
        """
        held, loaded = self._in, self._in.loaded
        assert self._state is not None
        proposed = self._state.proposal.confidence
        confidence = None if proposed is None else jnp.copy(proposed)  # the step uses its state up
        self._cache, state, done = speculate(
            loaded.model,
            self._drafter,
            loaded.adapter,
            self._cache,
            held.table,
            self._state,
            self._widths,
            held.sampling,
            self._options,
        )
        self._state = state
        return confidence, done, jnp.copy(state.anchors.running)

    def _part(self, confidence, done: Speculated, running) -> Part:
        verified = Verified(
            num_drafts=self._num_drafts,
            confidence=confidence,
            tested=np.asarray(done.tested),
            accepted=np.asarray(done.accepted),
            running=running,
        )
        return Part(generated=done.generated, verified=verified)


Decoder = PlainDecoder | SpeculativeDecoder
