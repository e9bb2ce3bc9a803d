"""The method Generate: what a stream and a whole answer consist of, and what ends them."""

from dataclasses import replace

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as messages

from minimax_jax.chat import Tokenizer
from serving.rpc.service import ModelFiles
from serving.rpc.wire_state import Served
from tests.chat.folders import TINY
from tests.serving.servers import FakeEngine, connected, refused, request, run, soon, status


def generated(engine: FakeEngine | None = None, **fields):
    async def test():
        async with connected(engine) as it:
            return await it.generate(**fields)

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
    """F142."""
    *_, last = generated(max_tokens=2, stop=["END"])
    assert last.complete.matched_stop_str == "END"


@pytest.mark.parametrize("stream", [True, False])
def test_log_probabilities_are_parallel_arrays_of_the_tokens_that_come_with_them(stream):
    """F138: below any parser, one for each token, streamed and whole."""
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
    """F142."""
    engine = FakeEngine()
    engine.fault = "the logits of sequence 0 are not finite"
    assert refused("Generate", request(), engine) == (grpc.StatusCode.INTERNAL, engine.fault)
    assert not engine.held


def test_an_engine_that_forgets_an_end_is_found_out():
    """F142: no stream ends without a reason or an error."""

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
    """F142."""

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
    """F132: a stream after three messages."""

    async def test():
        async with connected(FakeEngine(step_s=0.05)) as it:
            call = it.stub.Generate(request(stream=stream))
            await soon(lambda: "r" in it.engine.held)
            for _ in range(3 * stream):
                assert (await call.read()).HasField("chunk")
            call.cancel()
            await soon(lambda: not it.engine.held and not len(it.server.requests))

    run(test)


def test_a_deadline_that_passes_frees_what_the_stream_held():
    """F132."""

    async def test():
        async with connected(FakeEngine(step_s=0.05)) as it:
            call = it.stub.Generate(request(), timeout=0.1)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                _ = [one async for one in call]
            assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await soon(lambda: not it.engine.held and not len(it.server.requests))

    run(test)
