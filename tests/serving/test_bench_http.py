"""The load generator over HTTP, against a small server of server-sent events."""

import asyncio
import json
from array import array
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from serving.bench.answers import Answer
from serving.bench.asks import Ask, Segment
from serving.bench.client import AskError
from serving.bench.http_client import HttpClient
from serving.bench.load import Load
from serving.bench.metrics_page import MetricsPage, read_page
from serving.bench.options import Agentic, Bench, Dataset, Numbers, Sampling, Target, Traffic
from serving.bench.results import results
from serving.bench.run import Setting
from serving.bench.run import run as run_bench
from serving.bench.workload import Texts
from tests.serving.servers import run, soon

USAGE = {"prompt_tokens": 20, "completion_tokens": 0, "total_tokens": 20}
MODELS = {"data": [{"id": "first", "max_model_len": 2048}, {"id": "second"}]}
PAGE = """# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{{engine="0"}} {0}
vllm:num_preemptions_total{{engine="1"}} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0"}} {1}
vllm:kv_cache_usage_perc{{engine="1"}} 0.25
"""


def event(text: str | None, tokens: int, *, chat: bool = False, **more: Any) -> dict[str, Any]:
    """A chunk with a text, or without choices, and the tokens so far."""
    choice = {"index": 0, "delta": {"content": text}} if chat else {"index": 0, "text": text}
    choices = [] if text is None else [choice | more.pop("choice", {})]
    return {"choices": choices, "usage": USAGE | {"completion_tokens": tokens} | more}


@dataclass
class Server:
    """Answers each POST with `chunks`, `gap_s` apart, or with `status`; keeps what it was asked."""

    chunks: list[Any] = field(default_factory=list)
    status: int = 200
    gap_s: float = 0.0
    pages: list[str] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    hung_up: int = 0
    port: int = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, path = head.decode().split()[:2]
                self.headers.append(head.decode().lower())
                size = next(
                    (int(line.split(b":")[1]) for line in head.lower().split(b"\r\n")
                     if line.startswith(b"content-length:")), 0)  # fmt: skip
                body = await reader.readexactly(size)
                await self._respond(method, path, body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.hung_up += 1
        finally:
            writer.close()

    async def _respond(self, method: str, path: str, body: bytes, writer: Any) -> None:
        if path == "/v1/models":
            await _whole(writer, 200, json.dumps(MODELS))
        elif path == "/metrics":
            page = self.pages.pop(0) if len(self.pages) > 1 else "".join(self.pages)
            await _whole(writer, 200 if page else 404, page)
        elif path == "/reset_prefix_cache":
            await _whole(writer, 200, "")
        elif not path.startswith("/v1/"):
            await _whole(writer, 404, "no such page")
        elif self.status != 200:
            await _whole(writer, self.status, '{"error": {"message": "busy"}}')
        else:
            self.asked.append({"path": path, **json.loads(body)})
            await self._stream(writer)

    async def _stream(self, writer: Any) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                     b"transfer-encoding: chunked\r\n\r\n")  # fmt: skip
        for chunk in [*self.chunks, "[DONE]"]:
            text = chunk if isinstance(chunk, str) else json.dumps(chunk, ensure_ascii=False)
            data = f": a comment\n\ndata: {text}\n\n".encode()
            for part in (data[:5], data[5:]):  # events do not come in one piece
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                await writer.drain()
            await asyncio.sleep(self.gap_s)
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def _whole(writer: Any, status: int, body: str) -> None:
    data = body.encode()
    writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(data), data))
    await writer.drain()


@asynccontextmanager
async def listening(server: Server):
    listener = await asyncio.start_server(server.answer, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    async with listener:
        yield server


TEXT = Ask(
    request_id="r",
    segments=(Segment(role="system", text="Be brief."), Segment(text=" Why?\u2028")),
    max_tokens=6,
)


def answered(server: Server, ask: Ask = TEXT, **target: Any) -> Answer:
    sampling = target.pop("sampling", Sampling())

    async def test():
        async with listening(server):
            options = {"backend": "openai", "model": "m"} | target
            client = HttpClient(Target(port=server.port, **options), sampling)
            answer = await Load(client).send(ask)
            await client.close()
            return answer

    return run(test)


COMPLETION = [event("a", 1), event("", 1), event("bc\u2028", 4), event(None, 5)]


def test_a_completion_is_timed_by_its_texts_and_counted_by_its_usage():
    answer = answered(server := Server(COMPLETION, gap_s=0.01))
    assert (answer.fate, answer.prompt_tokens, answer.output_tokens) == ("completed", 20, 5)
    assert answer.counts == [1, 4]  # the fifth token came without a text of its own
    assert answer.sent < answer.times[0] < answer.times[1] < answer.ended
    assert answer.cached_tokens is None
    assert server.asked[0]["path"] == "/v1/completions"
    assert server.asked[0]["prompt"] == "Be brief. Why?\u2028"
    assert server.asked[0]["max_tokens"] == 6


def test_a_chat_sends_messages_and_thoughts_and_calls_count_as_tokens():
    first = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}
    call = {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0}]}}]}
    last = event("x", 7, chat=True, choice={"finish_reason": "stop"})
    answer = answered(server := Server([first, thought, call, last]), backend="openai-chat")
    assert (len(answer.times), answer.output_tokens, answer.finish_reason) == (3, 7, "stop")
    asked = server.asked[0]
    assert asked["path"] == "/v1/chat/completions"
    assert asked["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Why?\u2028"},
    ]
    assert (asked["max_completion_tokens"], asked["stream"]) == (6, True)
    assert asked["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_cached_tokens_and_drafts_are_read_from_the_usage():
    last = event(
        None,
        9,
        prompt_tokens_details={"cached_tokens": 16},
        completion_tokens_details={
            "accepted_prediction_tokens": 6,
            "rejected_prediction_tokens": 15,
        },
    )
    answer = answered(Server([event("a", 1), last]))
    assert (answer.cached_tokens, answer.accepted_tokens, answer.draft_tokens) == (16, 6, 21)


def test_only_what_is_asked_of_sampling_is_sent():
    server = Server(COMPLETION)
    answered(server, sampling=Sampling(temperature=0.0, top_k=4), api_key="secret")
    asked = server.asked[0]
    assert (asked["temperature"], asked["top_k"]) == (0.0, 4)
    assert not asked.keys() & {"top_p", "min_p", "ignore_eos"}
    assert "authorization: bearer secret" in server.headers[0]


def test_another_endpoint_and_base_url_are_followed():
    server = Server(COMPLETION)
    answered(server, endpoint="/v1/own")
    assert server.asked[0]["path"] == "/v1/own"


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (Server(status=429), 'HTTP 429: {"error": {"message": "busy"}}'),
        (Server([event("a", 1), {"error": {"message": "lost"}}]), "{'message': 'lost'}"),
        (Server([event("a", 1), "{"]), "JSONDecodeError"),
        (Server([event(None, 0)]), "the answer has no token"),
    ],
)
def test_failures_have_the_reason_of_the_server(server, reason):
    answer = answered(server)
    assert answer.fate == "failed"
    assert answer.error.startswith(reason)


def test_a_server_that_is_gone_is_a_failure():
    async def test():
        client = HttpClient(Target(backend="openai", port=1, model="m"), Sampling())
        answer = await Load(client).send(TEXT)
        with pytest.raises(AskError, match="ConnectError"):
            await client.facts()
        await client.close()
        return answer

    assert run(test).error.startswith("ConnectError")


def test_a_cancelled_request_hangs_up():
    server = Server([event("a", n) for n in range(1, 100)], gap_s=0.02)

    async def test():
        async with listening(server):
            client = HttpClient(Target(backend="openai", port=server.port, model="m"), Sampling())
            load = Load(client)
            task = asyncio.create_task(load.send(TEXT))
            await soon(lambda: bool(server.asked))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await soon(lambda: server.hung_up == 1)
            await client.close()
            return load.answers

    assert [one.fate for one in run(test)] == ["cancelled"]


def test_facts_are_those_of_the_named_model_or_of_the_first():
    async def test():
        async with listening(Server()) as server:
            found = []
            for model in (None, "second"):
                target = Target(backend="openai", port=server.port, model=model)
                client = HttpClient(target, Sampling())
                facts = await client.facts()
                await client.flush()  # the gateway's page is not there, vLLM's is
                await client.close()
                found.append((facts.model, facts.max_model_len, facts.vocab_size))
            return found

    assert run(test) == [("first", 2048, None), ("second", None, None)]


def test_a_metrics_page_is_summed_over_engines_by_growth_and_peak():
    assert read_page(PAGE.format(3.0, 0.5)) == {"num_preemptions": 5.0, "kv_cache_usage_perc": 0.5}
    server = Server(pages=[PAGE.format(3.0, 0.75), PAGE.format(4.0, 0.5)])

    async def test():
        async with listening(server):
            page = MetricsPage(urls=[f"http://127.0.0.1:{server.port}/metrics"])
            async with page.watched():
                pass
            return page

    page = run(test)
    assert (page.seen, page.trouble) == ({"num_preemptions": 1.0, "kv_cache_usage_perc": 0.5}, "")


@pytest.mark.parametrize("pages", [[], ["not a { page"]])
def test_a_metrics_page_that_is_none_is_said_and_harms_nothing(pages):
    async def test():
        async with listening(Server(pages=pages)) as server:
            page = MetricsPage(urls=[f"http://127.0.0.1:{server.port}/metrics"])
            async with page.watched():
                pass
            return page

    page = run(test)
    assert page.seen == {} and "/metrics: " in page.trouble


def test_a_whole_run_over_http_reports_the_servers_metrics():
    server = Server(COMPLETION, pages=[PAGE.format(0.0, 0.5), PAGE.format(7.0, 0.5)])
    wanted = Bench(
        dataset=Dataset(random_input_len=12, random_output_len=5),
        traffic=Traffic(num_prompts=6, max_concurrency=2),
        report=replace(Bench().report, disable_tqdm=True),
    )
    result = whole_run(server, wanted)
    assert (result["completed"], result["total_output_tokens"]) == (6, 30)
    assert (result["num_preemptions"], result["peak_kv_cache_usage"]) == (7.0, 0.5)
    assert result["prefix_hit_rate"] is None
    assert {len(body["prompt"].split()) for body in server.asked} == {12}


def test_agents_over_a_chat_send_growing_messages():
    server = Server([event("x", 1, chat=True)])
    agents = Agentic(agentic_sessions=1, agentic_turns=Numbers((4, 4)), agentic_think_scale=0.0)
    wanted = Bench(
        target=Target(backend="openai-chat"),
        dataset=Dataset(dataset_name="agentic"),
        agentic=replace(agents, agentic_start=Numbers((0.0, 0.0))),
        report=replace(Bench().report, disable_tqdm=True),
    )
    whole_run(server, wanted)
    first, second, *_ = [body["messages"] for body in server.asked]
    assert [one["role"] for one in first] == ["system", "user"]
    assert second[:2] == first
    assert [one["role"] for one in second[2:]] == ["assistant", "user"]
    assert server.asked[0]["ignore_eos"] is True


def whole_run(server: Server, wanted: Bench) -> dict[str, Any]:
    backend = "openai" if wanted.target.backend == "grpc" else wanted.target.backend

    async def test():
        async with listening(server):
            target = Target(backend=backend, port=server.port)
            client = HttpClient(target, Sampling())
            setting = Setting(
                client=client,
                facts=await client.facts(),
                texts=Texts.load("tiny"),
                console=Console(file=StringIO()),
            )
            bench = replace(wanted, target=target)
            result = results(bench, await run_bench(bench, setting))
            await client.close()
            return result

    return run(test)


def test_ids_alone_are_no_prompt_of_http():
    ask = replace(TEXT, segments=(Segment(ids=array("i", [1])),))
    with pytest.raises(AssertionError):
        answered(Server(COMPLETION), ask)
