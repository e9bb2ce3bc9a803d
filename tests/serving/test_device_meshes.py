"""The engine on several devices: every mesh gives the tokens of one device, up to proven ties."""

import asyncio
import json
from dataclasses import replace

import jax
import pytest

from configs.parallel import ParallelConfig
from configs.speculative import SpeculativeConfig
from minimax_jax.checkpoint import parameters_of
from minimax_jax.loaded import LoadedModel
from minimax_jax.speculative.calibration import Calibration
from minimax_jax.speculative.setup import Speculation
from serving.device import ModelDevice
from serving.device.placement import num_data_ranks
from serving.scheduling.request import Asked
from serving.scheduling.sampling_params import SamplingParams, StructuredOutput
from sharding import SERVE, make_mesh, named_sharding, with_parallel
from tests.drafter.models import drafted, random_drafter
from tests.model.models import random_loaded, random_model, small, tokens
from tests.serving.devices import config_of
from tests.serving.engines import collect, run
from tests.serving.model_engines import (
    assert_prompt_is_scored,
    assert_whole_is_right,
    engine_over,
)

pytestmark = [pytest.mark.devices(8), pytest.mark.slow]

CONFIG = small(2, num_tokens=501)  # chooses two blocks of 16
ALONE = random_loaded(CONFIG)
JSON = StructuredOutput(kind="json", text=json.dumps({"type": "boolean"}), from_first_token=True)
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.9, "logprobs": 3, "top_p": 0.9},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 0.9, "presence_penalty": 1.0, "logit_bias": {3: 5.0}},
]
LENGTHS = (1, 16, 33, 90, 200)


def on_mesh(text: str) -> LoadedModel:
    """The random model, each device with its shard of every weight."""
    parallel = ParallelConfig.parse(text)
    mesh, rules, model = make_mesh(parallel), with_parallel(SERVE, parallel), random_model(CONFIG)
    for parameter in parameters_of(model).values():
        value = parameter.get_value()
        sharding = named_sharding(mesh, parameter.axes, rules, value.shape)
        parameter.set_value(jax.device_put(value, sharding))
    model.rules = rules
    return replace(ALONE, model=model, mesh=mesh)


def asked(index: int, **more) -> Asked:
    options = {"max_tokens": 12 + index, "seed": index, "ignore_eos": True}
    sampling = SamplingParams(**(options | KINDS[index % len(KINDS)]))
    length = LENGTHS[index * 7 // 3 % len(LENGTHS)]
    return Asked(
        request_id=f"r{index}", prompt=tokens(length, seed=index), sampling=sampling, **more
    )


def device_of(loaded: LoadedModel, **config) -> ModelDevice:
    """With one prefill program, into which long prompts go chunk by chunk."""
    own = {"block_size": loaded.row_tokens, "max_num_batched_tokens": 64}
    return ModelDevice(loaded, config_of(**own, **config), num_blocks=40 // loaded.page_ranks)


@pytest.fixture(scope="module")
def ready():
    """Two data ranks, and a device with all of its programs."""
    loaded = on_mesh("dp2")
    device = device_of(loaded)
    device.warm_up()
    yield loaded, device
    device.close()


def outputs(loaded: LoadedModel, device: ModelDevice, requests: list[Asked]):
    """What each request gives when all are sent together, and how many rows each rank ran."""
    rows, dispatch = [0] * num_data_ranks(loaded.mesh), device.dispatch

    def counted(plan, masks):
        for rank, part in enumerate(plan.ranks):
            rows[rank] += len(part.prefills) + len(part.decode_slots)
        return dispatch(plan, masks)

    async def test():
        async with engine_over(device, loaded) as engine:
            return await asyncio.gather(*(collect(engine.submit(one)) for one in requests))

    device.dispatch = counted
    wholes = [whole for (whole,) in run(test)]
    device.dispatch = dispatch
    return wholes, rows


@pytest.mark.parametrize(
    "mesh",
    ["dep2", "dp2,tp2,dcp2,ep", "dp2,tp4,dcp2,split"],  # tp2: test_two_processes
)
def test_mixed_requests_give_on_a_mesh_what_they_give_alone(mesh):
    requests, loaded = [asked(index) for index in range(12)], on_mesh(mesh)
    wholes, rows = outputs(loaded, device_of(loaded), requests)
    assert all(rows), f"a data rank ran nothing: {rows}"
    for one, whole in zip(requests, wholes, strict=True):
        assert_whole_is_right(ALONE, one, 0, whole)
        if one.sampling.prompt_logprobs is not None:
            assert_prompt_is_scored(ALONE, one, whole.parts[0])


def test_an_idle_rank_stalls_nobody_and_nothing_is_compiled_after_ready(ready):
    loaded, device = ready
    pinned = [asked(index, rank=1) for index in range(3)]
    compiled = device.compilations_after_ready  # the oracles of other tests count too
    wholes, rows = outputs(loaded, device, pinned)
    assert device.compilations_after_ready == compiled
    assert rows[0] == 0 and rows[1] > 0
    for one, whole in zip(pinned, wholes, strict=True):
        assert_whole_is_right(ALONE, one, 0, whole)


def test_a_grammar_binds_on_its_own_rank_alone(ready):
    bound = [asked(index, rank=index % 2) for index in range(4)]
    of_rank_1 = replace(bound[3], sampling=replace(bound[3].sampling, structured_outputs=JSON))
    loaded, device = ready
    wholes, _ = outputs(loaded, device, [*bound[:3], of_rank_1])
    assert ALONE.tokenizer is not None
    assert ALONE.tokenizer.decode(wholes[3].tokens).strip() in ("true", "false")
    for one, whole in zip(bound[:3], wholes, strict=False):
        assert_whole_is_right(ALONE, one, 0, whole)


@pytest.mark.parametrize("mesh", ["dp2"])
def test_greedy_speculation_on_a_mesh_gives_the_tokens_of_plain_decoding(mesh):
    config = drafted(CONFIG)
    speculation = Speculation(
        drafter=random_drafter(config),
        config=SpeculativeConfig(num_speculative_tokens=3, kv_cache_dtype="auto"),
        calibration=Calibration.none(7),
    )
    loaded = replace(on_mesh(mesh), speculation=speculation)
    greedy = [asked(5 * index) for index in range(6)]
    wholes, rows = outputs(loaded, device_of(loaded, num_speculative_tokens=3), greedy)
    assert all(rows)
    assert sum(whole.end.draft_tokens for whole in wholes) > 0
    for one, whole in zip(greedy, wholes, strict=True):
        assert_whole_is_right(ALONE, one, 0, whole)
