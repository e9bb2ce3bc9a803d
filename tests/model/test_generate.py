"""generate: greedy against scoring, independence of the batch, compilation, streams, stops and
refusals.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minimax_jax
from minimax_jax import generate
from minimax_jax.batch import Batch
from minimax_jax.cache import Cache
from minimax_jax.decoders import DECODE_STEPS
from minimax_jax.loaded import LoadedModel
from minimax_jax.steps import prefill
from tests.model.models import random_loaded, small, tokens


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return random_loaded(small(2, num_tokens=501))


@pytest.fixture(scope="module")
def without_stops(loaded) -> LoadedModel:
    """The same model, never ending by itself: token ids in, token ids out."""
    return replace(loaded, tokenizer=None, template=None)


def ids(completions) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def test_greedy_tokens_are_the_best_of_the_packed_logits_up_to_ties(without_stops):
    prompt = tokens(70)
    (completion,) = generate(without_stops, prompt, max_tokens=20, temperature=0.0, logprobs=0)
    sequence = np.array([*prompt, *completion.token_ids])
    scored = np.asarray(minimax_jax.logits(without_stops, sequence))[len(prompt) - 1 : -1]
    best = scored.max(axis=-1)
    chosen = scored[np.arange(20), completion.token_ids]
    np.testing.assert_allclose(chosen, best, atol=1e-4)
    logprobs = jax.nn.log_softmax(scored)[np.arange(20), np.array(completion.token_ids)]
    reported = [one.logprob for one in completion.logprobs]
    np.testing.assert_allclose(reported, logprobs, atol=1e-4)


def test_neighbours_do_not_change_a_sequence(without_stops):
    prompts = [tokens(n, seed=n) for n in (5, 70, 33)]
    options = {"max_tokens": 20, "temperature": 0.8, "seed": 7}
    together = ids(generate(without_stops, prompts, **options))
    for i, prompt in enumerate(prompts):
        alone = generate(without_stops, prompt, **(options | {"seed": 7 + i}))
        assert ids(alone)[0] == together[i]


def test_a_seed_repeats_and_seeds_differ(without_stops):
    prompts = [tokens(5)] * 8
    first, again = (
        ids(generate(without_stops, prompts, max_tokens=8, temperature=1.0, seed=3))
        for _ in range(2)
    )
    assert first == again and len(set(first)) == 8


def test_temperature_zero_ignores_the_seed(without_stops):
    outputs = {
        ids(generate(without_stops, tokens(5), max_tokens=8, temperature=0.0, seed=s))[0]
        for s in (1, 2, 3)
    }
    assert len(outputs) == 1


def test_a_new_length_inside_a_bucket_compiles_nothing(without_stops):
    compiled = []

    def listen(event: str, duration: float, **details):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    first, *same_bucket, other_bucket = [tokens(n) for n in (17, 18, 25, 32, 150)]
    generate(without_stops, first, max_tokens=20, temperature=0.0)
    jax.monitoring.register_event_duration_secs_listener(listen)
    for prompt in same_bucket:
        generate(without_stops, prompt, max_tokens=20, temperature=0.0)
    assert compiled == []
    generate(without_stops, other_bucket, max_tokens=20, temperature=0.0)
    assert compiled, "another bucket does compile, so the count is real"


def test_more_tokens_than_a_dispatch_end_at_the_length(without_stops):
    count = 2 * DECODE_STEPS + 3
    (completion,) = generate(without_stops, tokens(5), max_tokens=count, temperature=0.0)
    assert (completion.usage.completion_tokens, completion.finish_reason) == (count, "length")


def test_one_token_is_one_token(without_stops):
    (completion,) = generate(without_stops, tokens(5), max_tokens=1, temperature=0.0)
    assert completion.usage.completion_tokens == 1


def test_the_stream_joins_to_the_completions(loaded):
    prompts = ["What is 1+1?", "12"]
    options = {"max_tokens": 30, "temperature": 0.9, "seed": 1}
    whole = generate(loaded, prompts, **options)
    deltas = list(generate(loaded, prompts, stream=True, **options))
    for i, completion in enumerate(whole):
        mine = [delta for delta in deltas if delta.index == i]
        assert "".join(delta.text for delta in mine) == completion.text
        assert sum((delta.token_ids for delta in mine), ()) == completion.token_ids
        assert replace(mine[-1].completion, seconds=0.0) == replace(completion, seconds=0.0)
        assert all(delta.completion is None for delta in mine[:-1])


def test_padding_ids_are_never_drawn(without_stops):
    model = without_stops.model
    assert model.config.num_tokens < model.config.vocab_size
    rows = np.asarray(minimax_jax.logits(without_stops, tokens(20)))
    assert (rows[:, model.config.num_tokens :] == -np.inf).all()
    drawn = generate(without_stops, [tokens(5)] * 16, max_tokens=30, temperature=50.0)
    assert max(map(max, ids(drawn))) < model.config.num_tokens


def test_a_row_of_nan_ends_with_an_error_and_leaves_its_neighbours(without_stops):
    clean = generate(without_stops, tokens(6, seed=1), max_tokens=8, temperature=0.0)
    model = jax.tree.map(lambda leaf: leaf, without_stops.model)
    poisoned = model.embedding.get_value().at[490].set(jnp.nan)
    model.embedding.set_value(poisoned)
    broken = replace(without_stops, model=model)
    outputs = generate(broken, [[490, 1], tokens(6, seed=1)], max_tokens=8, temperature=0.0)
    assert (outputs[0].finish_reason, outputs[0].token_ids) == ("error", ())
    assert outputs[1].token_ids == clean[0].token_ids


def test_top_logprobs_are_the_likeliest_in_order(without_stops):
    (completion,) = generate(without_stops, tokens(5), max_tokens=4, temperature=0.0, logprobs=3)
    for entry in completion.logprobs:
        values = [value for _, value in entry.top]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert entry.top[0] == (entry.token_id, pytest.approx(entry.logprob))


def test_a_chat_is_rendered_by_the_template(loaded):
    chat = [{"role": "user", "content": "What is 1+1?"}]
    text = loaded.template.render(chat)
    options = {"max_tokens": 10, "temperature": 0.0}
    as_chat, as_text = (generate(loaded, prompt, **options) for prompt in (chat, text))
    assert ids(as_chat) == ids(as_text)
    assert as_chat[0].prompt_tokens == len(loaded.tokenizer.encode(text))
    assert as_text[0].reasoning is None


def test_scoring_ignores_how_a_pack_is_cut(without_stops):
    first, second = tokens(40, seed=1), tokens(30, seed=2)
    segments = np.repeat([0, 1], [40, 30])
    packed = minimax_jax.logits(without_stops, first + second, segments)
    alone = minimax_jax.logits(without_stops, second)
    np.testing.assert_allclose(packed[40:], alone, atol=1e-4)


def test_padding_of_a_pack_is_ignored(without_stops):
    ids_and_padding = [*tokens(30), *[0] * 10]
    segments = np.repeat([0, -1], [30, 10])
    packed = minimax_jax.logits(without_stops, ids_and_padding, segments)
    alone = minimax_jax.logits(without_stops, tokens(30))
    np.testing.assert_allclose(packed[:30], alone, atol=1e-4)


@pytest.mark.parametrize(
    ("prompt", "options", "sentence"),
    [
        ("", {}, "prompt 0 is empty"),
        ([], {}, "no prompts"),
        ([1, 600], {}, "token id 600 is not in 0..500"),
        ([1, -1], {}, "token id -1"),
        ([1] * 2048, {"max_tokens": 1}, "2048 tokens, which with max_tokens=1 .* context of 2048"),
        ([1], {"max_tokens": 0}, "max_tokens=0"),
        ([1], {"temperature": -1.0}, "temperature=-1.0"),
        ([1], {"logprobs": -1}, "logprobs=-1"),
        ([1], {"template_options": {"thinking_mode": "disabled"}}, "no prompt is a chat"),
        ([1], {"tools": [{"name": "f"}]}, "tools are given, but no prompt is a chat"),
        ([{"role": "user", "content": "x"}], {"tools": [{}]}, "tool 0 does not name its function"),
        ([1], {"stop": ["a", ""]}, "stop string is empty"),
        ([{"role": "friend", "content": "x"}], {}, "unknown role 'friend'"),
        ([{"content": "x"}], {}, "has no role"),
    ],
)
def test_an_impossible_request_is_one_sentence(loaded, prompt, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        generate(loaded, prompt, **options)


def test_text_needs_a_tokenizer(without_stops):
    with pytest.raises(ValueError, match=r"no tokenizer.json: give prompts as token ids"):
        generate(without_stops, "hello")


def test_an_unknown_option_is_refused(loaded):
    with pytest.raises(TypeError, match="max_token"):
        generate(loaded, "12", max_token=5)


def test_template_options_reach_the_template(loaded):
    chat = [{"role": "user", "content": "1+1?"}]
    options = {"thinking_mode": "disabled"}
    (completion,) = generate(loaded, chat, max_tokens=2, template_options=options)
    rendered = loaded.template.render(chat, **options)
    assert completion.prompt_tokens == len(loaded.tokenizer.encode(rendered))


@pytest.mark.parametrize("width", [16, 128, 256, 1024])
def test_padding_of_a_prompt_changes_no_logits(without_stops, width):
    """F184: five tokens in any bucket."""
    loaded, ids_ = without_stops, tokens(5)
    cache = Cache.empty(loaded.layout, 64)
    batch = Batch(
        tokens=jnp.zeros((1, width), jnp.int32).at[0, :5].set(jnp.array(ids_)),
        positions=jnp.full((1, width), -1, jnp.int32).at[0, :5].set(jnp.arange(5)),
        block_table=jnp.arange(64, dtype=jnp.int32)[None],
    )
    start = jnp.zeros((1, loaded.config.vocab_size))
    _, logits = prefill(loaded.model, None, cache, batch, jnp.array([4], jnp.int32), start)
    scored = np.asarray(minimax_jax.logits(loaded, ids_))[-1]
    np.testing.assert_allclose(logits[0], scored, atol=2e-5)
    assert int(jnp.argmax(logits[0])) == int(np.argmax(scored))
