"""Plain and speculative decoding of the same prompts through the jitted steps."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from configs.model import ModelConfig
from minimax_jax.batch import Batch
from minimax_jax.cache import Cache
from minimax_jax.drafter import Drafter
from minimax_jax.model import Model
from minimax_jax.sampling import History, SamplingParams, SamplingState
from minimax_jax.speculative.drafting import Proposal
from minimax_jax.speculative.steps import SpeculationOptions, SpeculationState, speculate, start
from minimax_jax.steps import DecodeOptions, DecodeState, decode, prefill
from tests.drafter.models import drafted, empty_cache, random_drafter
from tests.model.models import random_model

PAGES = 8  # a sequence


@dataclass
class Run:
    """Prompts in their pages, and how each is sampled; padding rows are empty prompts."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    config: ModelConfig
    model: Model
    drafter: Drafter

    @classmethod
    def of(cls, prompts, params, model=None) -> "Run":
        config = drafted()
        model = model or random_model(config)
        return cls(prompts, params, config, model, random_drafter(config))

    @property
    def count(self) -> int:
        return len(self.prompts)

    @property
    def table(self) -> jax.Array:
        """Scattered pages; the last block of the pool belongs to nobody."""
        order = np.random.default_rng(3).permutation(self.count * PAGES)
        return jnp.asarray(order.reshape(self.count, PAGES), jnp.int32)

    @property
    def sampling(self) -> SamplingState:
        lengths = [len(prompt) for prompt in self.prompts]
        return SamplingState.of(self.params, lengths, self.config.vocab_size)

    def prefilled(self, max_tokens: int, chunk: int = 64) -> tuple[Cache, DecodeState]:
        """The pages after the prompts, the drafter's too, and the logits after each."""
        lengths = np.array([len(prompt) for prompt in self.prompts], np.int32)
        cache = empty_cache(self.config, self.count * PAGES + 1)
        logits = jnp.zeros((self.count, self.config.vocab_size), jnp.float32)
        tokens = np.zeros((self.count, -(-lengths.max() // chunk) * chunk), np.int32)
        for row, prompt in enumerate(self.prompts):
            tokens[row, : len(prompt)] = prompt
        for begin in range(0, tokens.shape[1], chunk):
            positions = begin + np.arange(chunk)
            batch = Batch(
                tokens=jnp.asarray(tokens[:, begin : begin + chunk]),
                positions=jnp.asarray(
                    np.where(positions < lengths[:, None], positions, -1), jnp.int32
                ),
                block_table=self.table,
            )
            last = lengths - 1 - begin
            last = jnp.asarray(np.where((last >= 0) & (last < chunk), last, -1), jnp.int32)
            cache, logits = prefill(self.model, None, cache, batch, last, logits, self.drafter)
        state = DecodeState(
            logits=logits,
            positions=jnp.asarray(lengths),
            limits=jnp.asarray(lengths + max_tokens),
            running=jnp.asarray(lengths > 0),
            history=History.of(
                self.sampling, self.prompts, [[]] * self.count, self.config.vocab_size
            ),
        )
        return cache, state

    def plain(self, max_tokens: int, **options):
        """What plain decoding generates: tokens and log-probabilities [max_tokens, B]."""
        cache, state = self.prefilled(max_tokens)
        program = DecodeOptions(steps=max_tokens, **options)
        args = self.model, None, cache, self.table, state, self.sampling, program
        return jax.device_get(decode(*args)[2])

    def started(self, max_tokens: int, options: SpeculationOptions, chunk: int = 64):
        """The cache, the state and the first tokens."""
        cache, state = self.prefilled(max_tokens, chunk)
        args = self.model, self.drafter, cache, self.table, state, self.sampling, options
        begun, first = start(*args)
        return cache, begun, first

    def step(self, cache, state: SpeculationState, widths, options, allowed=None):
        """One `speculate`; the cache that is given is used up."""
        widths = jnp.broadcast_to(jnp.asarray(widths, jnp.int32), (self.count,))
        args = self.model, self.drafter, None, cache, self.table, state, widths, self.sampling
        return speculate(*args, options, allowed)

    def speculative(self, max_tokens: int, widths, options: SpeculationOptions):
        """Each sequence's generated tokens, and their log-probabilities, step by step to the end;
        `widths` may be a function of the step.
        """
        cache, state, first = self.started(max_tokens, options)
        parts, steps = [first], 0
        while bool(jnp.any(state.anchors.running)):
            width = widths(steps) if callable(widths) else widths
            cache, state, done = self.step(cache, state, width, options)
            parts, steps = [*parts, done.generated], steps + 1
        tokens, logprobs = [[] for _ in self.prompts], [[] for _ in self.prompts]
        for part in parts:
            shape = (-1, self.count)
            rows = np.asarray(part.tokens).reshape(shape), np.asarray(part.logprobs).reshape(shape)
            for row, sequence in zip(*np.nonzero(rows[0] >= 0), strict=True):
                tokens[sequence].append(int(rows[0][row, sequence]))
                logprobs[sequence].append(float(rows[1][row, sequence]))
        return tokens, logprobs


def proposing(state: SpeculationState, tokens: np.ndarray) -> SpeculationState:
    """The state with other drafts, [B, T], as a drafter that is sure of them would propose."""
    logits = 20.0 * jax.nn.one_hot(tokens, state.proposal.logits.shape[-1])
    proposal = Proposal(
        tokens=jnp.asarray(tokens, jnp.int32),
        logits=logits.astype(state.proposal.logits.dtype),
        confidence=state.proposal.confidence,
    )
    return replace(state, proposal=proposal)
