"""Schedulers over a real device, and and what the model says of their sequences."""

from collections import deque
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

import minimax_jax
from configs.serving import ServingConfig
from minimax_jax.loaded import LoadedModel
from minimax_jax.sampling import History, SamplingState, probabilities, processed, sample, uniform
from minimax_jax.sampling import SamplingParams as RowParams
from serving.device import ModelDevice
from serving.device.row_params import row_params
from serving.scheduling.decode_rows import ChooseDrafts
from serving.scheduling.plan import RankResult
from serving.scheduling.request import Asked, Request
from serving.scheduling.sampling_params import SamplingParams
from serving.scheduling.scheduler import Scheduler
from tests.model.models import tokens

# A tie: two logits, or a random number and the edge of a token's share, so near to each other that
# the rounding of another order of sums may decide.
GAP = 1e-4
LONGEST, ROWS = 512, 64  # tokens and rows that the oracle is compiled for


def config_of(**options) -> ServingConfig:
    defaults = {
        "block_size": 16,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "num_scheduler_steps": 4,
        "max_logprobs": 5,
    }
    return ServingConfig(**(defaults | options))


class Driver:
    """A scheduler and a device without an event loop. A device may have many drivers in a row."""

    def __init__(
        self,
        device: ModelDevice,
        loaded: LoadedModel,
        num_blocks: int = 0,
        *,
        choose_drafts: ChooseDrafts | None = None,
        **options,
    ):
        config, blocks = replace(device.config, **options), num_blocks or device.num_blocks
        self.scheduler = Scheduler(config, blocks, choose_drafts=choose_drafts)
        self.device, self.loaded = device, loaded
        self.asked: list[Request] = []
        self.results: list[RankResult] = []
        self._flying: deque = deque()

    def ask(self, name: str, prompt, *, more=None, **sampling) -> Request:
        """A request of one sequence; `prompt` is ids or how many random ones."""
        prompt = tokens(prompt, seed=prompt) if isinstance(prompt, int) else prompt
        params = SamplingParams(**({"max_tokens": 8, "temperature": 0.0} | sampling))
        stops = self.loaded.tokenizer.stop_ids
        asked = Asked(
            request_id=name, prompt=prompt, sampling=params, eos_token_ids=stops, **(more or {})
        )
        self.asked += self.scheduler.add(asked)
        return self.asked[-1]

    def step(self, masks=None) -> bool:
        """Plans as far ahead as may be and takes the oldest result; False if there was none."""
        while (plan := self.scheduler.plan()) is not None:
            self._flying.append(self.device.dispatch(plan, masks(plan) if masks else {}))
        if not self._flying:
            assert not self.scheduler.has_work, "work is left but nothing is planned"
            return False
        result = self._flying.popleft().result()
        self.results += result.ranks
        self.scheduler.commit(result)
        self.scheduler.check()
        return True

    def run(self, masks=None, most_steps: int = 1000) -> list[Request]:
        """Until nothing is left to do; all that was asked so far."""
        for _ in range(most_steps):
            if not self.step(masks):
                return self.asked
        raise AssertionError(f"not done after {most_steps} steps")


def output(request: Request) -> list[int]:
    return request.tokens[request.prompt_length :].tolist()


def assert_right(loaded: LoadedModel, request: Request, most_ties: int = 1) -> None:
    """Each token is the one that its options and seed draw from the logits of the whole sequence,
    which are computed without a cache; at most `most_ties` are decided by rounding.
    """
    ids, start = np.asarray(request.tokens), request.prompt_length
    stops = tuple(sorted(request.eos_or_stop_ids))
    params = row_params(
        request.sampling, seed=request.seed, stop_ids=stops, tokenizer=loaded.tokenizer
    )
    padding = LONGEST - len(ids)
    segments = np.pad(np.zeros(len(ids), int), (0, padding), constant_values=-1)
    rows = minimax_jax.logits(loaded, np.pad(ids, (0, padding)), segments)
    ties = []
    for first in range(start, len(ids), ROWS):
        places = np.minimum(np.arange(first, first + ROWS), len(ids) - 1)
        drawn, gaps = _drawn(rows[places - 1], params, ids, start, places)
        for place, token, gap in zip(places, drawn, gaps, strict=True):
            if token != ids[place]:
                assert gap < GAP, f"{request.request_id} at {place}: {ids[place]}, not {token}"
                ties.append(int(place))
    assert len(set(ties)) <= most_ties, f"{request.request_id}: {len(ties)} ties at {ties}"
    if ties:
        print(f"{request.request_id}: ties at {sorted(set(ties))}")


def _drawn(rows, params: RowParams, ids: np.ndarray, start: int, places: np.ndarray):
    """The tokens at these places of one sequence, and how near each is to another one."""
    num, vocab_size = len(places), rows.shape[1]
    sampling = SamplingState.of([params] * num, [start] * num, vocab_size)
    outputs = [ids[start:place].tolist() for place in places]
    history = History.of(sampling, [ids[:start].tolist()] * num, outputs, vocab_size)
    tokens, gaps = _draw(rows, sampling, history, jnp.asarray(places, jnp.int32))
    return np.asarray(tokens), np.asarray(gaps)


@jax.jit
def _draw(rows, sampling: SamplingState, history: History, positions):
    logits = processed(rows, sampling, positions, history)
    best = jax.lax.top_k(logits, 2)[0]
    shares = jnp.cumsum(probabilities(logits, sampling), axis=-1)
    edges = jnp.min(jnp.abs(shares - uniform(sampling, positions)[:, None]), axis=-1)
    gaps = jnp.where(sampling.temperature == 0, best[:, 0] - best[:, 1], edges)
    return sample(logits, sampling, positions), gaps
