"""The experts of each token: with the engine's outputs, whatever became of its pages meanwhile."""

import asyncio
from dataclasses import replace
from itertools import accumulate

import jax
import numpy as np
import pytest

from configs.speculative import SpeculativeConfig
from minimax_jax.batch import Batch, pack
from minimax_jax.cache import NO_ROUTE
from minimax_jax.context import Context
from minimax_jax.routes import Routes
from minimax_jax.speculative.calibration import Calibration
from minimax_jax.speculative.setup import Speculation
from serving import SamplingParams
from serving import __main__ as command
from serving.device import ModelDevice
from serving.device.placement import num_data_ranks
from serving.device.routing_records import RoutingRecords
from tests.drafter.models import drafted, random_drafter
from tests.model.models import random_loaded, small, tokens
from tests.model.oracles import best_margin
from tests.serving.devices import LONGEST, config_of
from tests.serving.engines import Whole, asked, collect, run, running
from tests.serving.fake_device import first_key, key_after
from tests.serving.fake_engine_device import experts_of
from tests.serving.model_engines import engine_over
from tests.serving.test_device_meshes import on_mesh
from tests.serving.test_llm import offline

ON = {"enable_return_routed_experts": True}
TIE = 1e-4  # between the last score that is chosen and the next one


def assert_own(prompt, whole: Whole) -> None:
    """The record is that of the sequence's tokens, all but the last."""
    keys = accumulate([*prompt, *whole.tokens], key_after, initial=first_key(None, 0))
    np.testing.assert_array_equal(whole.end.experts, experts_of([*keys][1:-1]))
    assert all(part.experts is None for part in whole.parts[:-1])


@pytest.mark.parametrize("drafts", [0, 3])
def test_f162_f163_a_record_is_that_of_the_tokens_through_hits_preemptions_and_drafts(drafts):
    async def test():
        async with running(20, num_speculative_tokens=drafts, max_num_seqs=6, **ON) as it:
            prompts = [list(range(i, i + length)) for i in (0, 1) for length in (1, 16, 40, 70)]
            prompts += prompts[-3:]
            options = [{"max_tokens": 1 + 9 * (i % 4), "n": 1 + i % 2} for i in range(len(prompts))]
            it.script("text", "hello world")
            await it.engine.pause()  # so that all are there when the first step is planned
            pairs = enumerate(zip(prompts, options, strict=True))
            many = [it.submit(f"r{i}", prompt, **some) for i, (prompt, some) in pairs]
            many.append(it.submit("text", 5, stop=("lo w",), max_tokens=60))
            await it.engine.resume()
            wholes = await asyncio.gather(*map(collect, many))
            assert wholes[-1][0].end.matched_stop == "lo w"
            wholes += [await it.run(name, prompts[3], max_tokens=2) for name in ("once", "again")]
            assert wholes[-1][0].end.cached_tokens == 64
            assert it.engine.statistics.preemptions > 0
            asked_for = [*prompts, range(5), prompts[3], prompts[3]]
            for prompt, sequences in zip(asked_for, wholes, strict=True):
                for whole in sequences:
                    assert_own(prompt, whole)
            await it.idle()

    run(test)


def test_an_abort_has_no_record_and_without_the_flag_nothing_has():
    async def test():
        async with running(step_s=0.001, **ON) as it:
            stream = it.submit("r", 5, max_tokens=400)
            await anext(stream)
            it.engine.abort("r")
            (whole,) = await collect(stream)
            assert (whole.reason, whole.end.experts) == ("abort", None)
            (scored,) = await it.run("scored", 20, max_tokens=0, prompt_logprobs=1)
            assert scored.end.experts.shape == (19, 1, 4)
        async with running() as it:
            (whole,) = await it.run("r", 5)
            assert whole.end.experts is None

    run(test)


def test_offline_outputs_have_them_under_vllms_name():
    with offline(**ON) as (llm, _):
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=5), use_tqdm=False)
        assert output.outputs[0].routed_experts.shape == (7, 1, 4)


def test_rows_are_written_to_the_blocks_of_their_own_rank_and_padding_nowhere():
    config = small(2)  # one layer with experts, 4 a token; blocks of 16
    records = RoutingRecords(config, num_ranks=2, num_blocks=3)
    assert records.num_bytes == 2 * 3 * 16 * 4
    experts = np.arange(6 * 4, dtype=np.uint8).reshape(6, 1, 4)
    blocks, places = np.array([2, 1, -1, 2, 2, -1]), np.array([0, 0, 3, 0, 1, 0])
    records.write(Routes(experts=experts, blocks=blocks, places=places))
    np.testing.assert_array_equal(records.of(0, [2, 1], 1), experts[:1])
    np.testing.assert_array_equal(records.of(1, [2], 2), experts[3:5])
    assert (records._experts != NO_ROUTE).any(-1).sum() == 4
    with pytest.raises(AssertionError, match="left no record"):
        records.of(0, [2, 1], 17)


def test_a_block_of_ranks_that_share_out_pages_has_the_tokens_of_each_one_after_another():
    records = RoutingRecords(small(2), num_ranks=1, num_blocks=2, page_ranks=2)
    experts = np.arange(20 * 4, dtype=np.uint8).reshape(20, 1, 4)
    count = np.arange(20)  # of the owned block 1, which is the model's blocks 2 and 3
    records.write(Routes(experts=experts, blocks=2 + count // 16, places=count % 16))
    np.testing.assert_array_equal(records.of(0, [1], 20), experts)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"moe_layers": (False, False)}, "this model has no layer with experts"),
        ({"moe": replace(small(2).moe, num_experts=256)}, "256 experts do not fit a byte"),
    ],
)
def test_a_model_whose_experts_have_no_record_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        RoutingRecords(replace(small(2), **changes), 1, 1)


def test_a_server_says_that_its_protocol_has_no_field_for_them(capsys):
    with pytest.raises(SystemExit) as end:
        command.main(["tiny", "--enable-return-routed-experts", "--no-http"])
    assert end.value.code == 2 and "the gRPC protocol has no field" in capsys.readouterr().err


PLAIN = random_loaded(small(2, num_tokens=501))
DRAFTS = 3


def two_ranks_with_drafts():
    config = SpeculativeConfig(num_speculative_tokens=DRAFTS, kv_cache_dtype="auto")
    drafter = random_drafter(drafted(small(2, num_tokens=501)))
    speculation = Speculation(drafter=drafter, config=config, calibration=Calibration.none(7))
    return replace(on_mesh("dp2"), speculation=speculation)


def assert_right(ids, experts) -> int:
    """The router's own choices, without a cache, but where two scores are a tie; how many are."""
    padded = np.pad(np.asarray(ids), (0, LONGEST - len(ids)))
    segments = np.where(np.arange(LONGEST) < len(ids), 0, -1)
    size = PLAIN.layout.block_size
    batch, places = pack(padded, segments, size, num_tiles=LONGEST // size + 1)
    rows = np.asarray(router_scores(batch))[places[: len(experts)]]
    own = np.sort(np.argsort(-rows, axis=-1)[:, : experts.shape[-1]], axis=-1)
    differ = (own != np.sort(experts[:, 0], axis=-1)).any(-1)
    assert (best_margin(rows, experts.shape[-1])[differ] < TIE).all()
    return int(differ.sum())


@jax.jit
def router_scores(batch: Batch) -> jax.Array:
    """The biased scores of the one layer that has experts, [tokens, E]."""
    model, layer = PLAIN.model, PLAIN.model.layers[1]
    x = model.walk(batch, PLAIN.layout, taps=(0,)).taps[0]
    context = Context.of(batch, PLAIN.config, PLAIN.layout, model.rules)
    attended, _ = layer.attention(layer.input_norm(x), None, 0, context, None)
    normed, router = layer.post_attention_norm(x + attended), layer.mlp.router
    scores = jax.nn.sigmoid(normed @ router.weight.get_value().T) + router.bias.get_value()
    return scores.reshape(-1, scores.shape[-1])


@pytest.mark.slow
@pytest.mark.devices(8)
def test_f163_a_models_records_are_its_routers_choices():
    """30 s: ranks, drafts, chunks, hits, preemptions and n; the second record of a prompt is the
    first, and the store is as large afterwards as before.
    """
    loaded = two_ranks_with_drafts()
    limits = {"max_num_batched_tokens": 64, "num_speculative_tokens": DRAFTS}
    device = ModelDevice(loaded, config_of(**limits, **ON), num_blocks=36)
    device.shapes._rows, device.shapes._decode_tokens = [4], [4 * (1 + DRAFTS)]
    size, ranks = device.record_bytes, num_data_ranks(loaded.mesh)
    prompts = [tokens(length, seed=length) for length in (150, 160, 170, 1, 300)]
    options = [{"max_tokens": 60, "n": 1 + i % 2, "temperature": 0.9} for i in range(5)]

    async def test():
        async with engine_over(device, loaded) as engine:
            await engine.pause()  # so that all are there when the first step is planned
            many = [
                engine.submit(asked(f"r{i}", prompt, **some))
                for i, (prompt, some) in enumerate(zip(prompts, options, strict=True))
            ]
            await engine.resume()
            found = await asyncio.gather(*map(collect, many))
            alone = [asked(f"s{i}", prompts[4], more={"rank": 0}) for i in range(2)]
            found += [await collect(engine.submit(one)) for one in alone]
            assert engine.statistics.preemptions > 0
            return found

    found = run(test)
    pairs = [
        ([*prompt, *whole.tokens], whole.end.experts)
        for prompt, sequences in zip([*prompts, *prompts[4:] * 2], found, strict=True)
        for whole in sequences
    ]
    ties = sum(assert_right(*pair) for pair in pairs)
    assert ties <= sum(len(experts) for _, experts in pairs) // 100
    first, second = found[-2][0].end, found[-1][0].end
    assert second.cached_tokens == 288
    np.testing.assert_array_equal(first.experts[:288], second.experts[:288])
    assert device.record_bytes == size == ranks * 36 * 16 * PLAIN.config.moe.experts_per_token
    device.close()
