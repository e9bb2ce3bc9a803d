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

from configs.speculative import SpeculativeConfig
from minimax_jax.batch import Batch
from minimax_jax.cache import Cache
from minimax_jax.chat import Prompt
from minimax_jax.completion import Collector, Delta, TokenLogprob
from minimax_jax.decoders import Decoder, Part, PlainDecoder, Prefilled, SpeculativeDecoder
from minimax_jax.loaded import LoadedModel
from minimax_jax.sampling import History, SamplingParams, SamplingState
from minimax_jax.steps import DecodeState, Generated, bucket, prefill

PREFILL_TOKENS = 8192  # in one prefill step, all sequences together


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """What holds for every sequence of a call."""

    max_tokens: int
    stop: tuple[str, ...]
    logprobs: int | None  # likeliest ids reported at each place; None: no log-probabilities at all
    speculative: SpeculativeConfig | None = None  # None: plain decoding


class Wave:
    """Some sequences in lock-step: their pages, their decoder, and their collectors."""

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
        cache, table = loaded.pages(self.num_rows, width)
        vocab_size = loaded.config.vocab_size
        sampling = SamplingState.of(
            [*params, *[SamplingParams()] * unused], lengths.tolist(), vocab_size
        )
        padded = [*(prompt.ids for prompt in prompts), *[[]] * unused]
        cache, logits = self._prefill(prompts, lengths, cache, table)
        state = DecodeState(
            logits=logits,
            positions=jnp.asarray(lengths),
            limits=jnp.asarray(lengths + options.max_tokens),
            running=jnp.asarray(lengths > 0),
            history=History.of(sampling, padded, [[]] * self.num_rows, vocab_size),
        )
        prefilled = Prefilled(
            loaded=loaded,
            cache=cache,
            table=table,
            state=state,
            sampling=sampling,
            max_tokens=options.max_tokens,
            top_logprobs=options.logprobs or 0,
        )
        self.decoder = _decoder(prefilled, options)

    @property
    def running(self) -> bool:
        """Whether any sequence goes on."""
        return any(collector.finish_reason is None for collector in self.collectors)

    def advance(self) -> Iterator[Delta]:
        """One dispatch; what it added to each sequence."""
        before = [collector.finish_reason is None for collector in self.collectors]
        for part in self.decoder.advance():
            for row, collector in enumerate(self.collectors):
                _collect(collector, part, row)
        going = np.zeros(self.num_rows, bool)
        going[: len(before)] = [one.finish_reason is None for one in self.collectors]
        self.decoder.keep(going)
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

    def _prefill(
        self, prompts: list[Prompt], lengths: np.ndarray, cache: Cache, table: jax.Array
    ) -> tuple[Cache, jax.Array]:
        """Pages filled chunk by chunk, those of a drafter that is used too, and the logits after
        each prompt's last token.
        """
        loaded, longest = self.loaded, int(lengths.max())
        drafter = None if self.options.speculative is None else loaded.drafter
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
                block_table=table,
            )
            last = lengths - 1 - start
            last = jnp.asarray(np.where((last >= 0) & (last < chunk), last, -1), jnp.int32)
            with loaded.on_mesh():
                cache, logits = prefill(
                    loaded.model, loaded.adapter, cache, batch, last, logits, drafter
                )
        return cache, logits


def _decoder(prefilled: Prefilled, options: GenerateOptions) -> Decoder:
    if options.speculative is None:
        return PlainDecoder(prefilled)
    return SpeculativeDecoder(prefilled, options.speculative)


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


def _collect(collector: Collector, part: Part, row: int) -> None:
    """Hands one sequence its tokens of a part, and what became of its drafts; nothing once it has
    ended.
    """
    if collector.finish_reason is not None:
        return
    committed, verified = _push_tokens(collector, part.generated, row), part.verified
    if verified is not None and committed:
        collector.speculation.record(
            tested=int(verified.tested[row]),
            accepted=min(int(verified.accepted[row]), committed),
            committed=committed,
            num_drafts=verified.num_drafts,
        )


def _push_tokens(collector: Collector, generated: Generated, row: int) -> int:
    """How many tokens the sequence took."""
    before = len(collector.entries)
    for step in range(len(generated.tokens)):
        if collector.finish_reason is not None:
            break
        if generated.broken[step, row]:
            collector.finish("error")
        elif generated.tokens[step, row] >= 0:
            collector.push(_entry(generated, step, row))
    return len(collector.entries) - before


def _entry(generated: Generated, step: int, row: int) -> TokenLogprob:
    top = zip(generated.top_tokens[step, row], generated.top_logprobs[step, row], strict=True)
    return TokenLogprob(
        token_id=int(generated.tokens[step, row]),
        logprob=float(generated.logprobs[step, row]),
        top=tuple((int(token), float(value)) for token, value in top),
    )
