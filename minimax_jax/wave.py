"""A wave: some sequences in lock-step through the jitted steps, each with its own run of blocks of
one pool.

Shapes are buckets (sequences, prompt chunk, blocks a sequence), so that a new length inside a
bucket compiles nothing. A row's tokens do not depend on the rows beside it.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b

import jax
import jax.numpy as jnp
import numpy as np

from minimax_jax.batch import Batch
from minimax_jax.cache import Cache
from minimax_jax.chat import Prompt
from minimax_jax.completion import Collector, Delta, TokenLogprob
from minimax_jax.loaded import LoadedModel
from minimax_jax.sampling import History, SamplingParams, SamplingState
from minimax_jax.steps import DecodeOptions, DecodeState, Generated, bucket, decode, prefill

PREFILL_TOKENS = 8192  # in one prefill step, all sequences together
DECODE_STEPS = 16  # tokens a dispatch


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """What holds for every sequence of a call."""

    max_tokens: int
    stop: tuple[str, ...]
    logprobs: int | None  # likeliest ids reported at each place; None: no log-probabilities at all


class Wave:
    """Some sequences in lock-step: their pages, their device state, and their collectors."""

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: list[Prompt],
        params: list[SamplingParams],
        options: GenerateOptions,
    ):
        """Runs the prompts into the pages; the first tokens are then ready to be sampled."""
        self.loaded, self.options, self.started = loaded, options, time.perf_counter()
        self.collectors = [
            _collector(loaded, prompt, one, options)
            for prompt, one in zip(prompts, params, strict=True)
        ]
        self.num_rows = bucket(len(prompts))
        unused = self.num_rows - len(prompts)
        lengths = np.array([len(prompt.ids) for prompt in prompts] + [0] * unused, np.int32)
        blocks = -(-(int(lengths.max()) + options.max_tokens) // loaded.layout.block_size)
        width = bucket(blocks, smallest=loaded.config.indexer.top_k)
        self.cache = Cache.empty(loaded.layout, self.num_rows * width)
        self.table = jnp.arange(self.num_rows * width, dtype=jnp.int32).reshape(-1, width)
        vocab_size = loaded.config.vocab_size
        self.sampling = SamplingState.of(
            [*params, *[SamplingParams()] * unused], lengths.tolist(), vocab_size
        )
        padded = [*(prompt.ids for prompt in prompts), *[[]] * unused]
        self.state = DecodeState(
            logits=self._prefill(prompts, lengths),
            positions=jnp.asarray(lengths),
            limits=jnp.asarray(lengths + options.max_tokens),
            running=jnp.asarray(lengths > 0),
            history=History.of(self.sampling, padded, [[]] * self.num_rows, vocab_size),
        )

    @property
    def running(self) -> bool:
        """Whether any sequence goes on."""
        return any(collector.finish_reason is None for collector in self.collectors)

    def advance(self) -> Iterator[Delta]:
        """One dispatch; what it added to each sequence."""
        top = self.options.logprobs or 0
        steps = min(DECODE_STEPS, bucket(self.options.max_tokens))
        program = DecodeOptions(steps=steps, top_logprobs=top)
        loaded = self.loaded
        with loaded.on_mesh():
            self.cache, self.state, generated = decode(
                loaded.model,
                loaded.adapter,
                self.cache,
                self.table,
                self.state,
                self.sampling,
                program,
            )
        generated = jax.device_get(generated)
        before = [collector.finish_reason is None for collector in self.collectors]
        for row, collector in enumerate(self.collectors):
            if before[row]:
                _collect(collector, generated, row)
        going = [collector.finish_reason is None for collector in self.collectors]
        going += [False] * (self.num_rows - len(going))
        self.state = replace(self.state, running=self.state.running & jnp.array(going))
        for row, collector in enumerate(self.collectors):
            if before[row]:
                yield self._delta(row, collector)

    def _delta(self, row: int, collector: Collector) -> Delta:
        delta = collector.delta(row)
        if collector.finish_reason is None:
            return delta
        seconds = time.perf_counter() - self.started
        with_logprobs = self.options.logprobs is not None
        return replace(delta, completion=collector.completion(seconds, logprobs=with_logprobs))

    def _prefill(self, prompts: list[Prompt], lengths: np.ndarray) -> jax.Array:
        """Fills the pages chunk by chunk; the logits after each prompt's last token."""
        loaded, longest = self.loaded, int(lengths.max())
        block = loaded.layout.block_size
        chunk = min(bucket(longest, smallest=block), max(block, PREFILL_TOKENS // self.num_rows))
        tokens = np.zeros((self.num_rows, -(-longest // chunk) * chunk), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt.ids)] = prompt.ids
        logits = jnp.zeros((self.num_rows, loaded.config.vocab_size), jnp.float32)
        for start in range(0, longest, chunk):
            positions = np.arange(start, start + chunk)
            batch = Batch(
                tokens=jnp.asarray(tokens[:, start : start + chunk]),
                positions=jnp.asarray(
                    np.where(positions < lengths[:, None], positions, -1), jnp.int32
                ),
                block_table=self.table,
            )
            last = lengths - 1 - start
            last = jnp.asarray(np.where((last >= 0) & (last < chunk), last, -1), jnp.int32)
            with loaded.on_mesh():
                self.cache, logits = prefill(
                    loaded.model, loaded.adapter, self.cache, batch, last, logits
                )
        return logits


def _collector(
    loaded: LoadedModel, prompt: Prompt, params: SamplingParams, options: GenerateOptions
) -> Collector:
    # Tool calls of one prompt and seed have the same ids each time; those of later turns differ.
    asked = blake2b(np.array([params.seed, *prompt.ids]).tobytes(), digest_size=8)
    return Collector(
        prompt,
        loaded.tokenizer,
        max_tokens=options.max_tokens,
        stop_ids=params.stop_token_ids,
        stop=options.stop,
        min_tokens=params.min_tokens,
        reply_id=asked.hexdigest(),
    )


def _collect(collector: Collector, generated: Generated, row: int) -> None:
    """Hands one sequence its tokens of a dispatch."""
    for step in range(len(generated.tokens)):
        if collector.finish_reason is not None:
            return
        if generated.broken[step, row]:
            collector.finish("error")
            return
        top = zip(generated.top_tokens[step, row], generated.top_logprobs[step, row], strict=True)
        entry = TokenLogprob(
            token_id=int(generated.tokens[step, row]),
            logprob=float(generated.logprobs[step, row]),
            top=tuple((int(token), float(value)) for token, value in top),
        )
        collector.push(entry)
