"""What is compiled, when, and what it takes: nothing after ready, and no copy of the pool."""

import logging
from collections import Counter
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from minimax_jax.sampling.logprobs import CHUNK
from serving.device import ModelDevice, num_blocks_for
from serving.device import num_blocks as sizes
from serving.device.arrays import tiles_of
from serving.device.compilations import CompilationCounter
from serving.device.programs import Programs
from serving.scheduling.shapes import Shape
from tests.model.models import random_loaded, small
from tests.serving.devices import Driver, config_of

pytestmark = pytest.mark.slow

LOADED = random_loaded(small(2, num_tokens=501))
BIG_POOL = 8192  # blocks, 151 MB, against which a step's own arrays are small


@pytest.fixture(scope="module")
def ready():
    """A device that has warmed up, its programs kept on disk, and what it told of it."""
    device, told = ModelDevice(LOADED, config_of(), BIG_POOL), []
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    device.warm_up(lambda *said: told.append(said))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    yield device, told
    device.close()


def test_f190_mixed_requests_compile_nothing_after_ready(ready, caplog):
    device, _ = ready
    driver = Driver(device, LOADED, num_blocks=60)
    for i in range(30):
        options = [
            {},
            {"temperature": 0.9, "top_p": 0.8, "seed": i},
            {"logprobs": 4, "prompt_logprobs": 2},
            {"frequency_penalty": 0.5, "logit_bias": {3: 2.0}, "bad_words": ("x",)},
            {"min_tokens": 3, "stop_token_ids": (1, 2)},
        ][i % 5]
        driver.ask(f"r{i}", list(range(1 + 10 * i)), max_tokens=1 + i % 17, **options)
    with caplog.at_level(logging.WARNING):
        driver.run()
    assert device.compilations_after_ready == 0 and not caplog.records


def test_the_counter_hears_of_a_program(ready):
    counter = CompilationCounter()
    jax.jit(lambda x: x * 3 + 1)(jnp.arange(7)).block_until_ready()
    counter.close()
    heard = counter.count
    jax.jit(lambda x: x * 5 + 1)(jnp.arange(7)).block_until_ready()
    assert heard > 0 and counter.count == heard


def test_warm_up_tells_each_program_once_and_there_are_few(ready):
    """F189."""
    device, told = ready
    names = [name for name, _, _ in told]
    assert len(set(names)) == len(names) == device.num_programs == 9
    assert [done for _, done, _ in told] == list(range(1, 10))
    assert {total for _, _, total in told} == {9}


def test_f189_a_second_start_takes_every_program_from_disk(ready):
    device, _ = ready
    heard = Counter()
    listen = lambda event, **_: heard.update([event.rpartition("/")[2]])  # noqa: E731
    jax.monitoring.register_event_listener(listen)
    second = ModelDevice(LOADED, config_of(), BIG_POOL)
    second.warm_up(lambda *_: None)
    jax.monitoring.unregister_event_listener(listen)
    second.close()
    assert heard["cache_hits"] >= device.num_programs == second.num_programs
    assert not heard["cache_misses"]


def test_no_step_program_copies_the_pool(ready):
    device, _ = ready
    programs = device.programs
    steps = [name for name in programs if name.startswith(("prefill", "decode"))]
    assert len(steps) == 4
    pool_bytes = BIG_POOL * LOADED.layout.block_bytes
    for name in steps:
        needs = programs[name].memory_analysis()
        assert needs.temp_size_in_bytes < 0.05 * pool_bytes, name
        assert needs.alias_size_in_bytes >= pool_bytes, f"{name} does not write in place"


def test_f178_a_prefill_makes_no_logits_of_all_its_tokens(ready):
    device, _ = ready
    shape = Shape(kind="prefill", rows=4, tokens=1024, pages=24)  # contexts of 384 tokens, not V
    tiles, size = tiles_of(shape, 16)
    [call] = device._calls.empty(shape)
    text = device._programs.traced(call, device._kept.arguments(call)).as_text()
    vocab = LOADED.config.vocab_size
    assert f"{tiles}x{size}x64xf32" in text, "the hidden states are not those of all tokens"
    assert f"<4x{vocab}xf32>" in text
    assert f"<{CHUNK}x{vocab}xf32>" in text, "scored prompts have logits of a few rows at a time"
    assert f"{tiles * size}x{vocab}x" not in text and f"{tiles}x{size}x{vocab}x" not in text


@pytest.mark.parametrize("tokens", [1, 16, 64, 100, 2048])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_tiles_hold_any_chunks_and_pad_to_twice_the_tokens_at_most(tokens, rows):
    tiles, size = tiles_of(Shape(kind="prefill", rows=rows, tokens=tokens, pages=8), 16)
    ragged = [tokens // rows + (i < tokens % rows) for i in range(rows)]
    one_long = [max(1, tokens - rows + 1)] + [1] * (min(rows, tokens) - 1)
    for lengths in (ragged, one_long):
        assert sum(-(-length // size) for length in lengths) <= tiles
    assert tiles * size <= max(2 * tokens, tokens + rows)


def test_a_pool_without_room_for_the_longest_sequence_is_refused_with_the_largest_length():
    config = config_of(num_gpu_blocks_override=20)
    with pytest.raises(ValueError) as error:
        num_blocks_for(LOADED, config)
    assert str(error.value) == (
        "max_model_len=512 needs 32 blocks, but num_gpu_blocks_override says 20: "
        "the largest max_model_len is 320"
    )
    assert num_blocks_for(LOADED, replace(config, max_model_len=320)) == 20


def test_a_cpu_has_blocks_for_all_sequences_up_to_a_gibibyte():
    assert num_blocks_for(LOADED, config_of()) == 4 * 32
    most = (1 << 30) // LOADED.layout.block_bytes
    wide = config_of(max_num_seqs=64, max_model_len=100_000, max_num_batched_tokens=128)
    assert num_blocks_for(LOADED, wide) == most


def test_f193_a_block_size_that_is_not_the_models_is_refused():
    with pytest.raises(ValueError, match="block_size=128, but this model chooses blocks of 16"):
        num_blocks_for(LOADED, config_of(block_size=128))


class Gpu:
    """The memory of one, which is not there."""

    platform = "gpu"

    def memory_stats(self):
        return {"bytes_limit": 100_000_000, "bytes_in_use": 20_000_000}


def test_a_gpu_has_blocks_for_what_weights_slots_and_the_largest_steps_leave(monkeypatch):
    """The steps are those of the pool that will be, not of the small one that they are tried on."""
    loaded = random_loaded(small(1, num_tokens=501))
    monkeypatch.setattr(sizes, "_devices", lambda loaded: [Gpu()])
    tried, prepare, programs = mock.Mock(side_effect=ModelDevice), Programs.prepare, {}
    monkeypatch.setattr(sizes, "ModelDevice", tried)

    def noted(self, call, arguments):
        programs[call.name] = prepare(self, call, arguments)
        return programs[call.name]

    monkeypatch.setattr(Programs, "prepare", noted)
    config = config_of(max_model_len=64, max_num_seqs=16, gpu_memory_utilization=0.8)
    num_blocks = num_blocks_for(loaded, config)
    assert tried.call_args.args[2] == 4
    starts = [name.split(",")[0] for name in programs]
    assert starts == ["decode of 16 rows", "prefill of 128 tokens"]
    needs = [program.memory_analysis() for program in programs.values()]
    step = max(one.temp_size_in_bytes + one.output_size_in_bytes for one in needs)
    step -= 4 * loaded.layout.block_bytes  # the pool is written in place
    slots = ModelDevice(loaded, config, 4).slot_bytes
    assert slots > 16 * loaded.config.vocab_size * 5 and step > 0
    most = (60_000_000 - slots) // loaded.layout.block_bytes
    assert most - step // loaded.layout.block_bytes - 1 <= num_blocks < most
