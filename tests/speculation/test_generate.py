"""generate and its command with speculation: the same answers, cut where they have to be."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

import minimax_jax
from configs.speculative import SpeculativeConfig
from minimax_jax import generate
from minimax_jax.__main__ import main
from minimax_jax.chat import Chat
from minimax_jax.generate import read_prompt
from minimax_jax.speculative.stats import SpeculationStats
from tests.speculation.tiny import chats, exact_tiny, proven_ties

ASKED = chats(4)
# The same shapes and reports throughout, so that few programs are compiled.
COMMON = {"max_tokens": 40, "logprobs": 2}
GREEDY = {"temperature": 0.0, **COMMON}


@pytest.fixture(scope="module")
def loaded():
    return exact_tiny()


@pytest.fixture(scope="module")
def plain(loaded):
    return generate(loaded, ASKED, speculative=False, **GREEDY)


@pytest.fixture(scope="module")
def speculated(loaded):
    return generate(loaded, ASKED, **GREEDY)


def ids(completions) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def test_greedy_speculation_is_greedy_decoding_with_its_log_probabilities(plain, speculated):
    """F112, F100."""
    assert ids(speculated) == ids(plain)
    for ours, theirs in zip(speculated, plain, strict=True):
        assert (ours.text, ours.reasoning) == (theirs.text, theirs.reasoning)
        assert ours.finish_reason == theirs.finish_reason
        assert len(ours.logprobs) == len(ours.token_ids)
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert a.token_id == b.token_id and len(a.top) == 2
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_the_counts_are_those_of_the_tokens(plain, speculated):
    assert all(completion.speculation is None for completion in plain)
    for completion in speculated:
        stats = completion.speculation
        assert stats.committed == len(completion.token_ids) - 1  # the first is the target's own
        assert stats.accepted <= stats.drafted <= 7 * stats.steps
        assert stats.accepted <= stats.committed <= stats.accepted + stats.steps
        assert len(stats.reached) == 7 and stats.reached == sorted(stats.reached, reverse=True)
    total = SpeculationStats.total(completion.speculation for completion in speculated)
    assert total.acceptance_length > 3


@pytest.mark.parametrize("width", [2, 7])
def test_fewer_drafts_verified_change_no_answer(loaded, plain, width):
    """F101: the drafter proposes its block, and some of it is verified."""
    config = replace(loaded.speculation.config, num_speculative_tokens=width)
    completions = generate(loaded, ASKED, speculative=config, **GREEDY)
    assert ids(completions) == ids(plain)
    total = SpeculationStats.total(completion.speculation for completion in completions)
    assert len(total.reached) == width and 1 < total.acceptance_length <= width + 1


def test_drafts_drawn_greedily_change_no_greedy_answer(loaded, plain):
    config = replace(loaded.speculation.config, draft_sample_method="greedy")
    assert ids(generate(loaded, ASKED, speculative=config, **GREEDY)) == ids(plain)


@pytest.mark.parametrize("place", [1, 3, 4, 5, 6, 7, 8, 9, 10])
def test_a_length_or_a_stop_id_cuts_at_every_place_of_a_block(loaded, plain, place):
    """F105, F135: nothing after the cut, and a stop at the last place that is allowed is a stop."""
    whole = plain[0].token_ids
    assert len(whole) > 12
    cut = generate(loaded, ASKED, **(GREEDY | {"max_tokens": place}))[0]
    assert (cut.token_ids, cut.finish_reason) == (whole[:place], "length")
    stop = whole[place - 1]
    end = whole.index(stop) + 1
    options = GREEDY | {"max_tokens": end, "stop_token_ids": (stop,)}
    stopped = generate(loaded, ASKED, **options)[0]
    assert (stopped.token_ids, stopped.finish_reason) == (whole[:end], "stop")


def test_a_stop_string_cuts_inside_a_block(loaded, plain):
    thought = plain[0].reasoning
    for length in (2, 3, 5):
        stop = thought[length : length + 2]
        wanted = generate(loaded, ASKED, speculative=False, stop=stop, **GREEDY)[0]
        found = generate(loaded, ASKED, stop=stop, **GREEDY)[0]
        assert found.stop == stop and found.finish_reason == "stop"
        assert (found.token_ids, found.reasoning) == (wanted.token_ids, wanted.reasoning)
        assert found.speculation is None or found.speculation.committed < len(found.token_ids)


@pytest.mark.slow
def test_options_hold_under_speculation(loaded, plain):
    """Penalties and edits see drafts as history; min_tokens counts them."""
    said = plain[0].token_ids
    options = {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "logit_bias": {said[0]: -100.0},
        "min_tokens": 30,
        **GREEDY,
    }
    wanted = generate(loaded, ASKED, speculative=False, **options)
    assert ids(wanted) != ids(plain)
    found = generate(loaded, ASKED, **options)
    proven_ties(loaded, ASKED, found, wanted)
    assert all(len(completion.token_ids) >= 30 for completion in found)


@pytest.mark.slow
def test_a_seed_repeats_whatever_stands_beside_it(loaded):
    options = {"temperature": 1.0, **COMMON}
    together = ids(generate(loaded, ASKED, seed=5, **options))
    assert ids(generate(loaded, ASKED, seed=5, **options)) == together
    assert ids(generate(loaded, ASKED, seed=6, **options)) != together
    for row, chat in enumerate(ASKED):
        assert ids(generate(loaded, [chat], seed=5 + row, **options)) == [together[row]]


def test_log_probabilities_of_sampled_tokens_are_the_targets(loaded):
    """F112: at a temperature, with a penalty and a bias, the raw ones of scoring."""
    options = {"temperature": 0.5, "presence_penalty": 0.3, "logit_bias": {7: -5.0}, **COMMON}
    found = generate(loaded, ASKED, **options)[0]
    prompt = read_prompt(loaded, ASKED[0], Chat(messages=())).ids
    sequence = np.array([*prompt, *found.token_ids])
    scored = np.asarray(minimax_jax.logits(loaded, sequence))[len(prompt) - 1 : -1]
    wanted = np.asarray(jax.nn.log_softmax(scored))
    for place, entry in enumerate(found.logprobs):
        assert entry.logprob == pytest.approx(wanted[place, entry.token_id], abs=1e-3)
        assert entry.top[0][1] == pytest.approx(wanted[place].max(), abs=1e-3)


def test_the_stream_joins_to_the_completions(loaded):
    options = {"temperature": 1.0, "seed": 2, **COMMON}
    whole = generate(loaded, ASKED, **options)
    deltas = list(generate(loaded, ASKED, stream=True, **options))
    for row, completion in enumerate(whole):
        mine = [delta for delta in deltas if delta.index == row]
        assert sum((delta.token_ids for delta in mine), ()) == completion.token_ids
        assert replace(mine[-1].completion, seconds=0.0) == replace(completion, seconds=0.0)
        assert max(len(delta.token_ids) for delta in mine) > 1


def test_what_the_model_was_not_loaded_for_is_refused(loaded):
    bare = replace(loaded, speculation=None)
    with pytest.raises(ValueError, match="loaded without its drafter"):
        generate(bare, ASKED, speculative=True)
    with pytest.raises(ValueError, match="kv_cache_dtype='fp8', but the model was loaded with"):
        generate(loaded, ASKED, speculative=SpeculativeConfig())
    wide = replace(loaded.speculation.config, num_speculative_tokens=9)
    with pytest.raises(ValueError, match="num_speculative_tokens=9 is more than the drafter's 7"):
        generate(loaded, ASKED, speculative=wide)


def test_the_command_speculates_and_says_so(capsys):
    config = '{"num_speculative_tokens": 7, "attention_backend": "FLASHINFER_TS"}'
    asked = ("generate", "--model", "tiny", "--chat", "What is 47 + 38?")
    main([*asked, "--speculative", "--json"])
    record = json.loads(capsys.readouterr().out)
    keys = {"steps", "drafted", "accepted", "acceptance_length", "per_position"}
    assert record["text"] == "85" and set(record["speculation"]) == keys
    assert record["speculation"]["acceptance_length"] > 3
    main([*asked, "--speculative-config", config])
    captured = capsys.readouterr()
    assert captured.err.count("FLASHINFER_TS: dispatch chooses") == 1
    assert "tokens a step" in captured.out.splitlines()[-1]


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ('{"num_drafts": 3}', "the speculative config has no num_drafts"),
        ('{"num_speculative_tokens": 8}', "is more than the drafter's 7"),
        ("7", "no JSON object"),
    ],
)
def test_a_config_that_cannot_be_is_one_sentence_of_the_command(capsys, config, sentence):
    with pytest.raises(SystemExit):
        main(["generate", "--model", "tiny", "--prompt", "1", "--speculative-config", config])
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_greedy_speculation_is_greedy_decoding_on_200_problems_up_to_ties():
    """With the caches that users get: NVFP4 keys and values, FP8 draft context."""
    loaded = minimax_jax.load("tiny", speculative=True)
    asked = chats(200)
    options = {"temperature": 0.0, "max_tokens": 64}
    wanted = generate(loaded, asked, speculative=False, **options)
    found = generate(loaded, asked, **options)
    ties = proven_ties(loaded, asked, found, wanted)
    print(ties)
    assert len(ties.rows) <= 2, str(ties)
    total = SpeculationStats.total(completion.speculation for completion in found)
    assert total.acceptance_length > 3
