"""What single requests ask of their rows: edits, penalties, log-probabilities, masks; the rows
beside them notice nothing.
"""

import jax
import numpy as np
import pytest

import minimax_jax
from minimax_jax.sampling import packed_mask
from serving.device import ModelDevice
from serving.scheduling.sampling_params import StructuredOutput
from tests.model.models import random_loaded, small, tokens
from tests.serving.devices import Driver, assert_right, config_of, output

LOADED = random_loaded(small(2, num_tokens=501))
VOCAB_SIZE = LOADED.config.vocab_size
OPTIONS = {
    "bias": {"logit_bias": {3: 100.0, 5: 99.5, 7: -100.0}, "temperature": 1.0},
    "allowed": {"allowed_token_ids": tuple(range(40, 60)), "temperature": 1.0},
    "early": {"min_tokens": 12, "stop_token_ids": tuple(range(0, 500, 9)), "max_tokens": 30},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "cuts": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "words": {"bad_words": ("e", "the"), "temperature": 0.9},
    "all": {
        "logit_bias": {11: 4.0},
        "allowed_token_ids": tuple(range(200)),
        "bad_words": ("a",),
        "frequency_penalty": 0.7,
        "temperature": 1.1,
        "top_p": 0.95,
    },
}


@pytest.fixture(scope="module")
def device():
    made = ModelDevice(LOADED, config_of(), num_blocks=96)
    yield made
    made.close()


def test_every_option_does_what_it_does_alone_beside_others_and_after_a_preemption(device):
    driver = Driver(device, LOADED, num_blocks=16, enable_prefix_caching=False)
    for i, (name, options) in enumerate(OPTIONS.items()):
        driver.ask(name, 40 + i, **({"max_tokens": 40, "seed": i} | options))
        driver.ask(f"plain {i}", 30 + i, max_tokens=25)
    asked = driver.run()
    assert sum(one.num_preemptions for one in asked) > 0
    for request in asked:
        assert_right(LOADED, request, most_ties=2)
    early = next(one for one in asked if one.request_id == "early")
    assert len(output(early)) > 12


def test_a_slot_keeps_nothing_of_the_options_of_the_sequence_before(device):
    driver = Driver(device, LOADED)
    for i in range(4):
        options = {"logit_bias": {9: 100.0}, "frequency_penalty": 2.0, "stop_token_ids": (9,)}
        driver.ask(f"first {i}", 20 + i, max_tokens=6, **options)
    driver.run()
    second = [driver.ask(f"second {i}", 20 + i, max_tokens=12) for i in range(4)]
    driver.run()
    for request in second:
        assert_right(LOADED, request)


def test_log_probabilities_are_those_of_the_raw_distribution(device):
    driver = Driver(device, LOADED)
    asked = driver.ask("asked", 50, max_tokens=9, logprobs=3, temperature=0.7, top_k=5, seed=1)
    driver.ask("beside", 50, max_tokens=9)
    chosen_only = driver.ask("chosen", 20, max_tokens=1, logprobs=0)
    slots = {}
    while driver.step():
        slots |= {one.slot: one for one in (asked, chosen_only) if one.slot >= 0}
    rows = [found for result in driver.results for found in result.logprobs.values()]
    values = [value for found in rows if len(found.top_ids[0]) == 3 for value in found.values]
    wanted = np.asarray(jax.nn.log_softmax(minimax_jax.logits(LOADED, asked.tokens[:-1].tolist())))
    wanted = wanted[asked.prompt_length - 1 :]
    np.testing.assert_allclose(values, wanted[np.arange(9), output(asked)], atol=1e-4)
    tops = [ids for found in rows for ids in found.top_ids if len(ids) == 3]
    assert tops == np.argsort(-wanted, axis=1)[:, :3].tolist()
    assert sum(found.top_ids == [[]] for found in rows) == 1
    assert len(rows) == len({id(one) for one in rows}) and len(values) == 9


def test_prompts_are_scored_chunk_by_chunk_and_alone_if_nothing_is_generated(device):
    driver = Driver(device, LOADED)
    driver.ask("beside", 30, max_tokens=20)
    driver.step()
    scored = driver.ask("scored", 300, max_tokens=0, prompt_logprobs=2)
    driver.run()
    found = [one for result in driver.results for one in result.prompt_logprobs.values()]
    assert len(found) > 2 and output(scored) == [] and scored.finish_reason == "length"
    wanted = np.asarray(jax.nn.log_softmax(minimax_jax.logits(LOADED, scored.tokens.tolist())))
    values = [value for one in found for value in one.values]
    places = np.arange(299)
    np.testing.assert_allclose(values, wanted[places, np.array(scored.tokens)[1:]], atol=1e-4)
    tops = [ids for one in found for ids in one.top_ids]
    assert tops == np.argsort(-wanted[:-1], axis=1)[:, :2].tolist()


def test_a_mask_binds_the_next_token_of_its_sequence_alone(device):
    driver = Driver(device, LOADED)
    grammar = StructuredOutput(kind="regex", text="x")
    bound = driver.ask("bound", 40, max_tokens=12, structured_outputs=grammar, logprobs=5)
    driver.ask("beside", 41, max_tokens=12)
    masked_steps = []

    def masks(plan):
        """Even ids for the first tokens; none later, as after a grammar's end."""
        slots = [row.slot for row in plan.ranks[0].prefills] + plan.ranks[0].decode_slots
        if bound.slot not in slots or bound.num_output_tokens >= 6:
            return {}
        masked_steps.append(bound.num_output_tokens)
        even = packed_mask(np.arange(501)[None] % 2 == 0)
        return {(0, bound.slot): even}

    driver.run(masks)
    assert masked_steps == list(range(6))
    assert all(token % 2 == 0 for token in output(bound)[:6])
    assert_right(LOADED, next(one for one in driver.asked if one.request_id == "beside"))
    free = driver.ask("free", [*bound.tokens[: bound.prompt_length + 6]], max_tokens=6)
    driver.run()
    assert output(free) == output(bound)[6:]
    found = [one for r in driver.results for one in r.logprobs.values()]
    assert all(token % 2 == 0 for one in found[:6] for token in one.top_ids[0])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias has 1025 entries, and 1024"),
        ({"stop_token_ids": tuple(range(49))}, "stop_token_ids has 49 entries, and 48 is the most"),
        ({"bad_words": ("x" * 60 + "qzk",)}, "the longest of bad_words has"),
    ],
)
def test_lists_that_a_row_cannot_hold_are_refused_before_anything_runs(device, options, sentence):
    driver = Driver(device, LOADED)
    request = driver.ask("r", tokens(5), **options)
    with pytest.raises(ValueError, match=sentence):
        device.check(request.sampling)
