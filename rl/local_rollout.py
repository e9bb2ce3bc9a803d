"""Rollouts in this process: a wave of samples in lock-step through the model's own prefill and
decode steps, the prompt run once for all samples of its group.

Log-probabilities are taken at the sampling temperature in the program that draws the tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from minimax_jax.batch import Batch
from minimax_jax.cache import POOL_AXES, Cache
from minimax_jax.loaded import LoadedModel
from minimax_jax.sampling import SamplingParams, SamplingState
from minimax_jax.steps import DecodeState, bucket, prefill
from rl.lockstep import Decoded, Found, PlainSteps, Prefilled, SpeculativeSteps, Steps
from rl.policy import Policy
from rl.rollouts import Finish, Rollout, RolloutRequest
from rl.wave_plan import WavePlan
from sharding.apply import local
from sharding.axes import DATA

PREFILL_TOKENS = 8192  # in one prefill step, all prompts together
LEAST_ROWS = 64  # fewer are hardly faster on a CPU, and each size is a program to compile


@dataclass(frozen=True, kw_only=True)
class LocalRollout:
    """A `RolloutFn`. `loaded` says what the cache stores; its weights are the policy's each time.
    At most `wave` samples run together. A model that was loaded to speculate does so, with its
    drafter as it is.
    """

    loaded: LoadedModel
    wave: int

    def __call__(self, policy: Policy, request: RolloutRequest) -> list[Rollout]:
        samples = request.seeds.shape[1]
        at_once = max(1, self.wave // samples)
        rollouts: list[Rollout] = []
        for first in range(0, len(request.prompts), at_once):
            part = replace(
                request,
                prompts=request.prompts[first : first + at_once],
                seeds=request.seeds[first : first + at_once],
            )
            with self.loaded.on_mesh():
                rollouts += _Wave(self.loaded, policy, part).run()
        return rollouts


@partial(jax.jit, donate_argnames=("cache",))
def copy_rows(cache: Cache, source: Int[Array, "S"], target: Int[Array, "S"]) -> Cache:
    """The cache with some rows and their records copied to others, by each data rank its own."""
    copy = local(
        lambda pool, source, target: pool.at[:, target].set(pool[:, source]),
        in_axes=[POOL_AXES, ("batch",), ("batch",)],
        out_axes=POOL_AXES,
    )
    copied = cache.with_pool(copy(cache.pool, source, target))
    if cache.choices is None:
        return copied
    per_rank = cache.pool.shape[1]  # the record has the rows of all data ranks in one
    ranks = len(cache.choices) // cache.blocks_of_data_rank
    first = jnp.repeat(jnp.arange(ranks) * per_rank, len(source) // ranks)
    choices = by_rows(cache.choices, cache)
    choices = choices.at[target + first].set(choices[source + first])
    return replace(copied, choices=choices.reshape(cache.choices.shape))


def by_rows(choices: Any, cache: Cache) -> Any:
    """A cache's record of experts [dP, L, Z, X] by rows of its pool [dR, n, L, Z, X]; on the host,
    one of numpy.
    """
    return choices.reshape(-1, cache.page_ranks, *choices.shape[1:])


class _Wave:
    """P prompts, padded to a bucket, with G samples each."""

    def __init__(self, loaded: LoadedModel, policy: Policy, request: RolloutRequest):
        self.policy, self.request, config = policy, request, loaded.config
        self.speculation = loaded.speculation
        self.num_prompts, self.samples = request.seeds.shape
        self.data_ranks = 1 if loaded.mesh is None else loaded.mesh.shape[DATA]
        rows = bucket(-(-self.num_prompts // self.data_ranks)) * self.data_ranks
        unused = rows - self.num_prompts
        self.prompts = [*request.prompts, *[()] * unused]
        lengths = [len(prompt) for prompt in self.prompts]
        self.plan = WavePlan.of(
            lengths,
            self.samples,
            request.max_tokens,
            loaded.row_tokens,
            least=-(-config.indexer.top_k // loaded.page_ranks),
            data_ranks=self.data_ranks,
        )
        self.cache = Cache.empty(loaded.layout, self.plan.num_rows, loaded.mesh, loaded.page_ranks)
        if request.record:
            self.cache = self.cache.recording(config)
        self.vocab_size = config.vocab_size
        self.block_size, self.row_tokens = loaded.layout.block_size, loaded.row_tokens

    def run(self) -> list[Rollout]:
        """All samples, those of a prompt together."""
        plan = self.plan
        logits = self._prefill()
        self.cache = copy_rows(self.cache, jnp.asarray(plan.copy_from), jnp.asarray(plan.copy_to))
        lengths = jnp.repeat(jnp.asarray(plan.lengths), self.samples)
        held = Prefilled(
            cache=self.cache,
            table=self.cache.blocks_of(jnp.asarray(plan.sample_table)),
            state=DecodeState(
                logits=jnp.repeat(logits, self.samples, axis=0),
                positions=lengths,
                limits=lengths + self.request.max_tokens,
                running=lengths > 0,
            ),
            sampling=self._sampling(),
        )
        count = len(held.table)
        parts = [found.of_all(rows, count) for rows, found in self._dispatches(held)]
        drafts = None if self.speculation is None else self.speculation.num_drafts
        decoded, stored = Decoded(parts, drafts), self._stored(held.cache)
        rows = range(self.num_prompts * self.samples)
        return [self._rollout(row, decoded, stored) for row in rows]

    def _dispatches(self, held: Prefilled) -> Iterator[tuple[np.ndarray, Found]]:
        """Each dispatch's rows and what it found of them, until nobody goes on. Once half of the
        rows have ended, the others go on alone, unless that would move some to another data rank.
        """
        steps, rows = self._steps(held), np.arange(len(held.table))  # the sample in each row
        while True:
            found, running = steps.advance()
            yield rows, found
            if not running.any():
                return
            size = bucket(int(running.sum()), smallest=LEAST_ROWS)
            if size < len(rows) and self.data_ranks == 1:
                kept = np.argsort(~running, kind="stable")[:size]
                held.keep(kept)
                rows = rows[kept]

    def _steps(self, held: Prefilled) -> Steps:
        if self.speculation is None:
            return PlainSteps(held, self.policy, self.request.max_tokens)
        return SpeculativeSteps(held, self.policy, self.speculation)

    def _sampling(self) -> SamplingState:
        request = self.request
        seeds = [int(seed) for seed in request.seeds.reshape(-1)]
        unused = len(self.plan.sample_table) - len(seeds)
        params = SamplingParams(temperature=request.temperature, stop_token_ids=request.stop_ids)
        return SamplingState.of([replace(params, seed=seed) for seed in seeds + [0] * unused])

    def _prefill(self) -> Float[Array, "P V"]:
        """Runs the prompts into their blocks chunk by chunk; the logits after each one's end."""
        lengths, rows = self.plan.lengths, len(self.prompts)
        longest = int(lengths.max())
        most = max(self.block_size, PREFILL_TOKENS // rows)
        chunk = min(bucket(longest, smallest=self.block_size), most)
        tokens = np.zeros((rows, -(-longest // chunk) * chunk), np.int32)
        for row, prompt in enumerate(self.prompts):
            tokens[row, : len(prompt)] = prompt
        logits = jnp.zeros((rows, self.vocab_size), jnp.float32)
        table, policy = self.cache.blocks_of(jnp.asarray(self.plan.prompt_table)), self.policy
        drafter = None if self.speculation is None else self.speculation.drafter
        for start in range(0, longest, chunk):
            positions = np.arange(start, start + chunk)
            places = np.where(positions < lengths[:, None], positions, -1).astype(np.int32)
            last = lengths - 1 - start
            last = np.where((last >= 0) & (last < chunk), last, -1).astype(np.int32)
            batch = Batch(
                tokens=jnp.asarray(tokens[:, start : start + chunk]),
                positions=jnp.asarray(places),
                block_table=table,
            )
            ends = jnp.asarray(last)
            self.cache, logits = prefill(
                policy.model, policy.adapter, self.cache, batch, ends, logits, drafter
            )
        return logits

    def _stored(self, cache: Cache) -> "_Stored":
        """What the cache holds by now of what is asked for."""
        request, pool = self.request, cache.pool
        if request.record_cache and len(pool) != 1:
            raise ValueError(f"replay_cache=true needs a cache of one rank, not of {len(pool)}")
        choices = None if cache.choices is None else by_rows(np.asarray(cache.choices), cache)
        return _Stored(
            choices=choices,
            pages=np.asarray(pool)[0] if request.record_cache else None,
        )

    def _rollout(self, row: int, decoded: Decoded, stored: "_Stored") -> Rollout:
        prompt, (tokens, logprobs) = self.prompts[row // self.samples], decoded.answer(row)
        stopped = tokens[-1:] and tokens[-1] in self.request.stop_ids
        finish: Finish = "aborted" if decoded.broken[row] else "stop" if stopped else "length"
        total = len(prompt) + len(tokens)
        rows = self.plan.sample_table[row][: -(-total // self.row_tokens)]
        of_rank = len(self.plan.sample_table) // self.data_ranks  # samples
        recorded = rows + row // of_rank * self.plan.num_rows
        return Rollout(
            prompt=tuple(prompt),
            tokens=tokens,
            logprobs=logprobs,
            finish=finish,
            version=self.policy.version,
            choices=None
            if stored.choices is None
            else stored.of_tokens(recorded, max(total - 1, 0)),
            pages=None if stored.pages is None else stored.pages[rows],
            speculation=decoded.speculation(row),
        )


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """The rows of the cache, on the host; None where they are not asked for."""

    choices: UInt8[np.ndarray, "P n L Z X"] | None
    pages: UInt8[np.ndarray, "P lines 128"] | None

    def of_tokens(self, rows: np.ndarray, count: int) -> UInt8[np.ndarray, "m L X"]:
        """The experts of the first tokens in some rows."""
        assert self.choices is not None
        experts = np.moveaxis(self.choices[rows], 2, 3)  # row, block, token, layer, choice
        return experts.reshape(-1, *experts.shape[3:])[:count]
