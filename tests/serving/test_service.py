"""What each method of the gRPC service beside Generate answers."""

import asyncio
import hashlib
import io
import json
import zipfile

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as messages

from serving.engine_api import EngineState
from serving.rpc.service import ModelFiles
from serving.scheduling.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored
from tests.chat.folders import TINY
from tests.serving.servers import FakeEngine, connected, refused, request, run, soon


def called(name: str, message, engine: FakeEngine | None = None, **options):
    async def test():
        async with connected(engine, **options) as it:
            return await getattr(it.stub, name)(message)

    return run(test)


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
    monkeypatch.setattr("serving.rpc.service.HEARTBEAT_S", 0.02)

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
