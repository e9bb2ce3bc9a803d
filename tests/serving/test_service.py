"""What each method of the gRPC service answers, over an engine without a model."""

import asyncio
import hashlib
import io
import json
import zipfile
from dataclasses import replace

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as messages

from minimax_jax.chat import Tokenizer
from serving.engine_api import EngineState
from serving.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored
from serving.service import ModelFiles
from serving.wire_state import Served
from tests.chat.folders import TINY
from tests.serving.servers import FakeEngine, connected, request, run, soon, status


def generated(engine: FakeEngine | None = None, **fields):
    async def test():
        async with connected(engine) as it:
            return await it.generate(**fields)

    return run(test)


def called(name: str, message, engine: FakeEngine | None = None, **options):
    async def test():
        async with connected(engine, **options) as it:
            return await getattr(it.stub, name)(message)

    return run(test)


def refused(name: str, message, engine: FakeEngine | None = None, **options):
    async def test():
        async with connected(engine, **options) as it:
            call = getattr(it.stub, name)(message)
            return await status(call.read() if hasattr(call, "read") else call)

    return run(test)


def test_a_stream_is_new_ids_alone_and_an_end_that_repeats_none():
    *chunks, last = generated(max_tokens=4)
    assert [list(one.chunk.token_ids) for one in chunks] == [[31], [32], [33], [34]]
    assert {one.chunk.completion_tokens for one in chunks} == {1}
    assert {(one.chunk.prompt_tokens, one.chunk.cached_tokens) for one in chunks} == {(3, 1)}
    end = last.complete
    assert (list(end.output_ids), end.completion_tokens, end.finish_reason) == ([], 0, "length")
    assert (end.prompt_tokens, end.cached_tokens) == (3, 1)
    assert end.WhichOneof("matched_stop") is None


def test_without_a_stream_a_sequence_is_one_response_with_everything():
    (only,) = generated(max_tokens=4, stream=False)
    end = only.complete
    assert (list(end.output_ids), end.completion_tokens) == ([31, 32, 33, 34], 4)
    assert (end.spec_draft_tokens, end.spec_accepted_tokens) == (12, 8)


def test_sequences_of_one_request_interleave_and_each_has_its_own_end():
    responses = generated(n=2, max_tokens=3, stop_token_ids=[132])
    chunks = [one.chunk for one in responses if one.HasField("chunk")]
    assert [(one.index, *one.token_ids) for one in chunks] == [
        (0, 31), (1, 131), (0, 32), (1, 132), (0, 33)
    ]  # fmt: skip
    ends = [one.complete for one in responses if one.HasField("complete")]
    assert [(one.index, one.finish_reason) for one in ends] == [(1, "stop"), (0, "length")]
    assert ends[0].matched_token_id == 132


def test_whole_sequences_of_one_request_come_each_as_one_response():
    ends = [one.complete for one in generated(n=2, max_tokens=2, stream=False)]
    assert [(one.index, *one.output_ids) for one in ends] == [(0, 31, 32), (1, 131, 132)]


def test_a_stop_text_that_was_met_is_told():
    *_, last = generated(max_tokens=2, stop=["END"])
    assert last.complete.matched_stop_str == "END"


@pytest.mark.parametrize("stream", [True, False])
def test_log_probabilities_are_parallel_arrays_of_the_tokens_that_come_with_them(stream):
    responses = generated(max_tokens=2, logprobs=2, stream=stream)
    parts = [one.chunk.output_logprobs for one in responses if one.HasField("chunk")]
    parts = parts or [responses[0].complete.output_logprobs]
    assert [token for part in parts for token in part.token_ids] == [31, 32]
    assert [value for part in parts for value in part.token_logprobs] == [0, -1]
    tops = [top for part in parts for top in part.top_logprobs]
    assert [list(top.token_ids) for top in tops] == [[31, 32], [32, 33]]
    assert [list(top.values) for top in tops] == [[0, -1], [-1, -2]]
    assert responses[-1].complete.HasField("output_logprobs") is not stream


@pytest.mark.parametrize("stream", [True, False])
def test_those_of_the_prompt_come_once_and_its_first_token_has_none(stream):
    responses = generated(max_tokens=2, prompt_logprobs=1, stream=stream)
    parts = [getattr(one, one.WhichOneof("response")) for one in responses]
    assert [one.HasField("input_logprobs") for one in parts].index(True) == 0
    assert sum(one.HasField("input_logprobs") for one in parts) == 1
    given = parts[0].input_logprobs
    assert list(given.token_ids) == [10, 20, 30]
    assert [one.HasField("value") for one in given.token_logprobs] == [False, True, True]
    assert [one.value for one in given.token_logprobs[1:]] == [-0.5, -1.0]
    assert [len(top.token_ids) for top in given.top_logprobs] == [1, 1, 1]


def test_a_prompt_alone_is_scored_with_no_tokens():
    first, last = generated(max_tokens=0, prompt_logprobs=0)
    assert first.chunk.HasField("input_logprobs") and not first.chunk.token_ids
    assert last.complete.finish_reason == "length"


def test_a_text_is_a_prompt_where_there_is_a_tokenizer():
    message = request(max_tokens=1)
    message.text = "hello"
    engine, files = FakeEngine(), ModelFiles(tokenizer=Tokenizer.load(TINY))

    async def test():
        async with connected(engine, files=files) as it:
            assert [one async for one in it.stub.Generate(message)]

    run(test)
    assert engine.asked[0].prompt == Tokenizer.load(TINY).encode("hello")
    code, text = refused("Generate", message)
    assert (code, "no tokenizer" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)


def test_an_unnamed_request_gets_a_name_and_an_adapters_listener_asks_for_the_adapter():
    engine = FakeEngine()

    async def test():
        served = Served(name="poet", model_path="/models/m3", adapter="poet")
        async with connected(engine, served=served) as it:
            await it.generate(request_id="", max_tokens=1)

    run(test)
    assert len(engine.asked[0].request_id) == 32
    assert (engine.asked[0].adapter, engine.asked[0].eos_token_ids) == ("poet", (7, 9))


def test_a_name_in_use_is_refused_and_the_one_in_use_goes_on():
    async def test():
        async with connected(FakeEngine(step_s=0.05)) as it:
            call = it.stub.Generate(request(max_tokens=6))
            await soon(lambda: "r" in it.engine.held)
            code, _ = await status(it.stub.Generate(request()).read())
            assert code is grpc.StatusCode.ALREADY_EXISTS
            assert len([one async for one in call]) == 7

    run(test)


def test_a_fault_of_the_engine_ends_the_call_with_its_sentence():
    engine = FakeEngine()
    engine.fault = "the logits of sequence 0 are not finite"
    assert refused("Generate", request(), engine) == (grpc.StatusCode.INTERNAL, engine.fault)
    assert not engine.held


def test_an_engine_that_forgets_an_end_is_found_out():
    class Forgetful(FakeEngine):
        def submit(self, asked):
            return super().submit(replace(asked, sampling=replace(asked.sampling, n=1)))

    engine = Forgetful()

    async def test():
        async with connected(engine) as it:
            return await status(it.generate(n=2, max_tokens=1))

    assert run(test) == (grpc.StatusCode.INTERNAL, "1 of 2 sequences have no end")


@pytest.mark.parametrize("stream", [True, False])
def test_abort_ends_a_stream_in_good_order_and_frees_it(stream):
    async def test():
        async with connected(FakeEngine(step_s=0.02)) as it:
            call = it.stub.Generate(request(n=2, stream=stream))
            await soon(lambda: "r" in it.engine.held)
            await it.stub.Abort(messages.AbortRequest(request_ids=["unknown", "r"]))
            assert not it.engine.held
            ends = [one.complete async for one in call if one.HasField("complete")]
            assert [(one.index, one.finish_reason) for one in ends] == [(0, "abort"), (1, "abort")]

    run(test)


def test_abort_reaches_no_request_of_another_listener():
    async def test():
        engine = FakeEngine(step_s=0.02)
        async with connected(engine) as one, connected(engine) as other:
            call = one.stub.Generate(request())
            await soon(lambda: "r" in engine.held)
            await other.stub.Abort(messages.AbortRequest(request_ids=["r"]))
            assert "r" in engine.held
            call.cancel()
            await soon(lambda: not engine.held)

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_a_cancelled_stream_frees_what_it_held(stream):
    async def test():
        async with connected(FakeEngine(step_s=0.05)) as it:
            call = it.stub.Generate(request(stream=stream))
            await soon(lambda: "r" in it.engine.held)
            call.cancel()
            await soon(lambda: not it.engine.held and not len(it.server.requests))

    run(test)


def test_a_deadline_that_passes_frees_what_the_stream_held():
    async def test():
        async with connected(FakeEngine(step_s=0.05)) as it:
            call = it.stub.Generate(request(), timeout=0.1)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                _ = [one async for one in call]
            assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await soon(lambda: not it.engine.held and not len(it.server.requests))

    run(test)


def test_embeddings_are_refused_by_name():
    code, text = refused("Embed", messages.EmbedRequest(request_id="e"))
    assert (code, "embeddings" in text) == (grpc.StatusCode.UNIMPLEMENTED, True)


def test_health_follows_the_engine():
    engine = FakeEngine()
    assert called("HealthCheck", messages.HealthCheckRequest(), engine).healthy
    engine.state = EngineState(is_healthy=False, message="device 3 is lost")
    answer = called("HealthCheck", messages.HealthCheckRequest(), engine)
    assert (answer.healthy, answer.message) == (False, "device 3 is lost")


def test_the_model_is_described():
    info = called("GetModelInfo", messages.GetModelInfoRequest())
    assert (info.served_model_name, info.model_path) == ("m3.1-flash", "/models/m3")
    assert (info.max_context_length, info.max_req_input_len, info.vocab_size) == (64, 63, 1000)
    assert (info.is_generation, info.supports_vision) == (True, False)
    assert (list(info.eos_token_ids), info.pad_token_id, info.bos_token_id) == ([7, 9], 3, 0)
    assert (info.model_type, *info.architectures) == ("minimax_m3", "MiniMaxM3ForCausalLM")
    assert json.loads(info.default_sampling_params_json) == {"temperature": 1.0, "top_p": 0.95}


def test_the_server_is_described():
    async def test():
        async with connected(FakeEngine(step_s=0.05)) as it:
            it.engine.state = EngineState(is_paused=True)
            call = it.stub.Generate(request())
            await soon(lambda: len(it.server.requests) == 1)
            info = await it.stub.GetServerInfo(messages.GetServerInfoRequest())
            call.cancel()
            await soon(lambda: not it.engine.held)
            return info

    info = run(test)
    assert (info.active_requests, info.is_paused, info.server_type) == (1, True, "vllm-grpc")
    assert info.uptime_seconds > 0 and info.last_receive_timestamp > 1.7e9
    assert (info.data_parallel_size, info.block_size, info.max_num_seqs) == (2, 16, 4)
    assert (info.kv_cache_dtype, info.model_dtype) == ("nvfp4", "bfloat16")
    assert info.constrained_decoding_start == "after_reasoning"
    assert info.engine_reasoning_parser == "minimax_m3"


def test_loads_are_told_for_all_ranks_or_one():
    answer = called("GetLoads", messages.GetLoadsRequest())
    assert (answer.dp_rank_count, [one.dp_rank for one in answer.loads]) == (2, [0, 1])
    answer = called("GetLoads", messages.GetLoadsRequest(dp_rank=1, include=["core"]))
    (load,) = answer.loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (0, 3, 3)
    assert (load.num_used_tokens, load.max_total_num_tokens, load.token_usage) == (50, 200, 0.25)
    assert (load.gen_throughput, load.cache_hit_rate, load.max_running_requests) == (12.5, 0.75, 4)
    assert load.num_waiting_uncached_tokens == 30
    code, text = refused("GetLoads", messages.GetLoadsRequest(dp_rank=2))
    assert (code, text) == (grpc.StatusCode.INVALID_ARGUMENT, "dp_rank=2 is not in 0..1")


def test_the_tokenizer_comes_as_an_archive_in_pieces_with_its_hash_at_the_end():
    async def test():
        async with connected(files=ModelFiles(folder=TINY)) as it:
            return [one async for one in it.stub.GetTokenizer(common.GetTokenizerRequest())]

    pieces = run(test)
    assert max(len(one.data) for one in pieces) <= 64 << 10
    data = b"".join(one.data for one in pieces)
    assert [one.sha256 for one in pieces[:-1]] == [""] * (len(pieces) - 1)
    assert pieces[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.read("tokenizer.json") == (TINY / "tokenizer.json").read_bytes()
        assert "chat_template.jinja" in archive.namelist()


def test_a_model_without_tokenizer_files_says_so(tmp_path):
    message = common.GetTokenizerRequest()
    assert refused("GetTokenizer", message)[0] is grpc.StatusCode.NOT_FOUND
    code, text = refused("GetTokenizer", message, files=ModelFiles(folder=tmp_path))
    assert (code, "no tokenizer.json" in text) == (grpc.StatusCode.NOT_FOUND, True)


def test_the_cache_is_flushed_only_when_nothing_runs():
    async def test():
        async with connected(FakeEngine(step_s=0.05)) as it:
            flush = common.FlushCacheRequest()
            assert (await it.stub.FlushCache(flush)).success
            call = it.stub.Generate(request())
            await soon(lambda: "r" in it.engine.held)
            answer = await it.stub.FlushCache(flush)
            assert (answer.success, "1 requests" in answer.message) == (False, True)
            call.cancel()
            await soon(lambda: not it.engine.held)
            assert it.engine.flushed == 1

    run(test)


@pytest.mark.parametrize("timeout", [-1.0, float("nan"), float("inf")])
def test_an_impossible_wait_for_a_flush_is_refused(timeout):
    code, _ = refused("FlushCache", common.FlushCacheRequest(timeout_s=timeout))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_a_profile_is_started_once_and_stopped_once(tmp_path):
    engine = FakeEngine()

    async def test():
        async with connected(engine, profile_dir=str(tmp_path)) as it:
            start = common.StartProfileRequest(output_dir="a", start_step=5, num_steps=2)
            answers = [await it.stub.StartProfile(start) for _ in range(2)]
            stop = common.StopProfileRequest()
            return answers + [await it.stub.StopProfile(stop) for _ in range(2)]

    assert [one.success for one in run(test)] == [True, False, True, False]
    (profile,) = engine.profiles
    assert (profile.folder, profile.start_step, profile.num_steps) == (str(tmp_path / "a"), 5, 2)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"output_dir": "../elsewhere"}, "not below the server's profile_dir"),
        ({"output_dir": "/tmp"}, "not below the server's profile_dir"),
        ({"output_dir": "a\0b"}, "is no path"),
        ({"activities": ["MEM"]}, "activities=['MEM'] are not among"),
        ({"record_shapes": True}, "record_shapes is not supported"),
        ({"start_step": -1}, "start_step=-1 is negative"),
        ({"num_steps": 0}, "num_steps=0 is not at least 1"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(tmp_path, fields, sentence):
    message = common.StartProfileRequest(**fields)
    code, text = refused("StartProfile", message, profile_dir=str(tmp_path))
    assert (code, sentence in text) == (grpc.StatusCode.INVALID_ARGUMENT, True), text


def test_profiling_is_off_without_a_folder():
    code, text = refused("StartProfile", common.StartProfileRequest())
    assert (code, "profile_dir" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)


STORED = BlocksStored(
    block_ids=(-5, 6), parent_id=4, token_ids=tuple(range(32)), block_size=16,
    adapter="poet", cache_salt="salt",
)  # fmt: skip


def test_kv_events_come_with_the_load_of_their_rank():
    async def test():
        async with connected() as it:
            it.engine.kv_events.publish(1, [STORED, BlocksRemoved(block_ids=(6,))])
            call = it.stub.SubscribeKvEvents(common.SubscribeKvEventsRequest())
            first = await call.read()
            it.engine.kv_events.publish(0, [AllBlocksCleared()])
            second = await call.read()
            call.cancel()
            return first, second

    first, second = run(test)
    assert (first.sequence_number, first.dp_rank, first.load.waiting_requests) == (1, 1, 3)
    assert not first.load.load_only
    stored, removed = first.events
    assert [one.block_hash for one in stored.stored.blocks] == [-5, 6]
    assert list(stored.stored.blocks[1].token_ids) == list(range(16, 32))
    assert (stored.stored.parent_block_hash, stored.stored.blocks[0].block_size) == (4, 16)
    assert (stored.stored.lora_name, stored.stored.cache_salt) == ("poet", "salt")
    assert list(removed.removed.block_hashes) == [6]
    assert (second.sequence_number, second.events[0].WhichOneof("data")) == (2, "cleared")


def test_loads_come_alone_while_nothing_happens(monkeypatch):
    monkeypatch.setattr("serving.service.HEARTBEAT_S", 0.02)

    async def test():
        async with connected() as it:
            message = common.SubscribeKvEventsRequest(load_records_before_first_batch=True)
            call = it.stub.SubscribeKvEvents(message)
            await call.initial_metadata()
            early = [await call.read() for _ in range(4)]
            call.cancel()
            await asyncio.sleep(0.05)
            return early

    early = run(test)
    assert [(one.sequence_number, one.dp_rank) for one in early] == [(0, 0), (0, 1)] * 2
    assert all(one.load.load_only and not one.events for one in early)
    assert early[2].load.sample > early[0].load.sample


def test_an_engine_that_records_no_events_says_so():
    engine = FakeEngine()
    engine.kv_events = None
    code, text = refused("SubscribeKvEvents", common.SubscribeKvEventsRequest(), engine)
    assert (code, "enable_kv_cache_events" in text) == (grpc.StatusCode.UNIMPLEMENTED, True)
