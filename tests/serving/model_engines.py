"""Engines over a real model, and what the model itself says of their outputs."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import jax
import jax.numpy as jnp
import numpy as np

import minimax_jax
from minimax_jax.loaded import LoadedModel
from serving.assembly import engine_info
from serving.device import ModelDevice
from serving.engine import BatchingEngine
from serving.engine_api import Output
from serving.grammar.matcher import GrammarMatcher
from serving.scheduling.request import Asked, Request
from tests.serving.devices import GAP, LONGEST, assert_right
from tests.serving.engines import Whole
from tests.serving.servers import soon


@asynccontextmanager
async def engine_over(device: ModelDevice, loaded: LoadedModel) -> AsyncIterator[BatchingEngine]:
    """An engine that is idle, and holds nothing, when the block has ended."""
    info = engine_info(loaded, device.config)
    engine = BatchingEngine(info, device.config, device, tokenizer=loaded.tokenizer)
    try:
        yield engine
        scheduler = engine._steps.scheduler
        await soon(lambda: not scheduler.has_work and not len(engine._ledger), 60)
        await soon(lambda: not engine._requests._streams)
        scheduler.check()
        assert all(rank.pages.num_available == device.num_blocks for rank in scheduler.ranks)
        assert engine._ledger.num_grammars == 0
    finally:
        await engine.close()


def request_of(asked: Asked, index: int, tokens: Sequence[int]) -> Request:
    """A sequence with these output tokens."""
    seed = asked.sampling.seed or 0
    request = Request(asked, index, seed=seed, arrival=0, max_model_len=LONGEST)
    request.tokens.extend(tokens)
    return request


def assert_whole_is_right(loaded: LoadedModel, asked: Asked, index: int, whole: Whole) -> None:
    """The tokens, and the log-probabilities if there are any, are the model's own."""
    assert_right(loaded, request_of(asked, index, whole.tokens))
    if asked.sampling.logprobs is None:
        return
    rows = scores(loaded, [*asked.prompt, *whole.tokens])
    given = whole.logprobs()
    assert [token for token, _, _ in given] == whole.tokens
    for place, (token, value, tops) in enumerate(given, start=len(asked.prompt) - 1):
        assert value is not None and abs(value - rows[place, token]) < 1e-3
        assert len(tops) == asked.sampling.logprobs
        best = np.sort(rows[place])[::-1][: len(tops)]
        np.testing.assert_allclose(rows[place, tops], best, atol=1e-3)


def assert_prompt_is_scored(loaded: LoadedModel, asked: Asked, first: Output) -> None:
    """The log-probabilities of the prompt are the model's own."""
    given, rows = first.prompt_logprobs, scores(loaded, asked.prompt)
    assert given is not None and list(given.token_ids) == list(asked.prompt)
    own = [rows[place, token] for place, token in enumerate(asked.prompt[1:])]
    assert given.values[0] is None
    np.testing.assert_allclose(given.values[1:], own, atol=1e-3)


def assert_obeys(
    loaded: LoadedModel, asked: Asked, tokens: Sequence[int], matcher: GrammarMatcher
) -> None:
    """Each token of a greedy sequence is the likeliest that the grammar allows, up to ties."""
    rows = scores(loaded, [*asked.prompt, *tokens])
    for place, token in enumerate(tokens, start=len(asked.prompt) - 1):
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: rows.shape[1]])
        assert token in allowed
        assert rows[place, allowed].max() - rows[place, token] < GAP
        matcher.advance([token])


def scores(loaded: LoadedModel, ids: Sequence[int]) -> np.ndarray:
    """The log-probabilities after each token, float32 [tokens, V]."""
    padding = LONGEST - len(ids)
    segments = np.pad(np.zeros(len(ids), int), (0, padding), constant_values=-1)
    rows = minimax_jax.logits(loaded, np.pad(np.asarray(ids), (0, padding)), segments)
    return np.asarray(jax.nn.log_softmax(jnp.asarray(rows), axis=-1))[: len(ids)]
