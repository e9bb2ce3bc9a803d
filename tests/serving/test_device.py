"""Plans run on a real device: its tokens are those of `generate`, whoever runs beside."""

import pytest

from minimax_jax import generate
from serving.device import ModelDevice
from tests.model.models import random_loaded, small, tokens
from tests.serving.devices import Driver, assert_right, config_of, output

LOADED = random_loaded(small(2, num_tokens=501))  # chooses two blocks of 16


@pytest.fixture(scope="module")
def device():
    made = ModelDevice(LOADED, config_of(), num_blocks=96)
    yield made
    made.close()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_tokens_are_those_of_generate(device, temperature):
    driver, prompts = Driver(device, LOADED), [tokens(n, seed=n) for n in (1, 16, 100, 130)]
    asked = [
        driver.ask(f"r{i}", prompt, temperature=temperature, seed=7 + i, max_tokens=16)
        for i, prompt in enumerate(prompts)
    ]
    driver.run()
    made = generate(LOADED, prompts, temperature=temperature, seed=7, max_tokens=16)
    assert [output(one) for one in asked] == [list(one.token_ids) for one in made]


def test_greedy_and_seeded_sequences_of_mixed_lengths_run_together(device):
    driver = Driver(device, LOADED)
    for i, length in enumerate((1, 15, 16, 17, 33, 100, 128, 300)):
        driver.ask(f"greedy {i}", length, max_tokens=20)
        driver.ask(f"seeded {i}", length, max_tokens=20, temperature=0.9, seed=i)
    asked = driver.run()
    assert len(asked) == 16
    for request in asked:
        assert_right(LOADED, request)


def test_a_prompt_beyond_the_budget_runs_in_chunks_beside_decode(device):
    driver = Driver(device, LOADED)
    short = driver.ask("short", 20, max_tokens=40)
    driver.step()
    long = driver.ask("long", 450, max_tokens=30, temperature=0.8, seed=5, ignore_eos=True)
    driver.run()
    assert len(output(short)) == 40 and len(output(long)) == 30
    assert_right(LOADED, short)
    assert_right(LOADED, long)


def test_a_prefix_from_the_cache_gives_what_a_cold_run_gives(device):
    """F81: from blocks that are scattered, since an earlier prompt's were evicted for some."""
    driver = Driver(device, LOADED, num_blocks=24)
    driver.ask("earlier", 300, max_tokens=2)
    driver.run()
    first = driver.ask("first", tokens(200, seed=3), max_tokens=10)
    driver.step()
    assert first.blocks != sorted(first.blocks)
    driver.run()
    again = driver.ask("again", tokens(200, seed=3), max_tokens=10)
    longer = driver.ask("longer", [*tokens(200, seed=3), *output(first), 7, 8], max_tokens=10)
    driver.run()
    assert first.cached_tokens == 0
    assert again.cached_tokens == 192 and longer.cached_tokens >= 192
    assert output(again) == output(first)
    assert_right(LOADED, longer)


def test_a_preempted_sequence_comes_back_as_if_nothing_had_been(device):
    driver = Driver(device, LOADED, num_blocks=14, enable_prefix_caching=False)
    asked = [
        driver.ask(f"r{i}", 50 + i, max_tokens=60, temperature=0.7 * (i % 2), seed=i)
        for i in range(4)
    ]
    driver.run()
    assert sum(one.num_preemptions for one in asked) > 0
    for request in asked:
        assert_right(LOADED, request)


def test_more_sequences_than_slots_take_turns(device):
    driver = Driver(device, LOADED)
    asked = [driver.ask(f"r{i}", 10 + 7 * i, max_tokens=3 + i % 5) for i in range(12)]
    driver.run()
    for request in asked:
        assert_right(LOADED, request)


def test_an_aborted_sequence_writes_nothing_into_the_blocks_of_the_next(device):
    driver = Driver(device, LOADED, num_blocks=12, enable_prefix_caching=False)
    driver.ask("gone", 100, max_tokens=80)
    for _ in range(3):
        driver.step()
    driver.scheduler.abort("gone")
    following = driver.ask("following", 120, max_tokens=40)
    driver.run()
    assert_right(LOADED, following)


def test_a_stop_token_ends_a_sequence_on_the_device_too(device):
    driver = Driver(device, LOADED)
    probe = driver.ask("probe", 30, max_tokens=9)
    driver.run()
    stop = output(probe)[6]
    stopped = driver.ask("stopped", 30, max_tokens=40, stop_token_ids=(stop,))
    ignoring = driver.ask("ignoring", 33, max_tokens=40, ignore_eos=True)
    driver.run()
    assert output(stopped)[-1] == stop and stopped.finish_reason == "stop"
    assert len(output(ignoring)) == 40
    assert_right(LOADED, stopped)


def test_the_last_place_of_the_context_is_used_and_none_behind_it(device):
    driver = Driver(device, LOADED)
    full = driver.ask("full", 500, max_tokens=None, ignore_eos=True)
    exact = driver.ask("exact", 511, max_tokens=None, ignore_eos=True)
    driver.run()
    assert full.num_tokens == 512 and exact.num_tokens == 512
    assert_right(LOADED, full)


def test_a_plan_of_several_ranks_is_refused(device):
    plan = Driver(device, LOADED)
    plan.ask("r", 5)
    step = plan.scheduler.plan()
    step.ranks.append(step.ranks[0])
    with pytest.raises(ValueError, match="2 data ranks, and the device 1"):
        device.dispatch(step, {})
