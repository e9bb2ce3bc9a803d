"""Our server behind the real `smg` gateway, driven by the real `openai` client."""

import asyncio
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from configs.server import ServerConfig
from minimax_jax.chat import Tokenizer
from serving.rpc.server import Server
from serving.rpc.service import ModelFiles
from serving.rpc.wire_state import Served
from serving.scheduling.request import Asked
from tests.chat.folders import TINY
from tests.serving.servers import INFO, PATIENCE_S, FakeEngine

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.parity

MODEL = "m3.1-flash"  # under a name that matches `minimax*` deltas are merged until they are long
THOUGHT, ANSWER = "Two and two make four.", "The answer is **4**, né?"
REPLY = f"<mm:think>{THOUGHT}</mm:think>{ANSWER}"
READY_S = 60
TOKENIZER = Tokenizer.load(TINY)


class Reciter(FakeEngine):
    """Answers the reply, whatever is asked, and ends it with the model's own end."""

    def __init__(self) -> None:
        stops = TOKENIZER.stop_ids
        info = replace(
            INFO, vocab_size=TOKENIZER.num_tokens, eos_token_ids=stops, max_model_len=2048
        )
        super().__init__(step_s=0.002, info=info)
        self.reply = REPLY

    def num_tokens(self, asked: Asked) -> int:
        return min(len(TOKENIZER.encode(self.reply)), super().num_tokens(asked))

    def token(self, asked: Asked, index: int, step: int) -> int:
        return TOKENIZER.encode(self.reply)[step]


class Stack:
    """An engine, our server in a thread, the gateway in a process, and a client."""

    def __init__(self, log: Path):
        self.engine, self.loop = Reciter(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        served, files = Served(name=MODEL, model_path=MODEL), ModelFiles(folder=TINY)
        config = ServerConfig(port=0, max_concurrent_requests=2)

        async def started() -> tuple[Server, int]:
            server = Server(self.engine, served, config, files)
            return server, await server.start()

        self.server, port = self.run(started())
        self._gateway, self.url = launched(port, log)
        self.client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=30)

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def close(self) -> None:
        self.client.close()
        self._gateway.send_signal(signal.SIGTERM)
        self._gateway.wait(30)
        self.run(self.server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def wait_until_ready(self, log: Path) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and self._gateway.poll() is None:
            try:
                self.chat()
                return
            except openai.APIError:
                time.sleep(0.2)
        raise RuntimeError(f"the gateway did not start:\n{log.read_text()[-3000:]}")

    def chat(self, **options):
        messages = options.pop("messages", [{"role": "user", "content": "2 + 2?"}])
        return self.client.chat.completions.create(model=MODEL, messages=messages, **options)


def launched(engine_port: int, log: Path) -> tuple[subprocess.Popen, str]:
    program = shutil.which("smg", path=str(Path(sys.executable).parent)) or shutil.which("smg")
    if program is None:
        pytest.skip("the package smg is not installed")
    port, metrics_port = free_port(), free_port()
    command = [
        *(program, "launch", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-port", str(metrics_port)),
        *("--worker-urls", f"grpc://127.0.0.1:{engine_port}"),
        *("--reasoning-parser", "minimax_m3", "--tool-call-parser", "minimax_m3"),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    return process, f"http://127.0.0.1:{port}/v1"


def free_port() -> int:
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def stack(tmp_path_factory) -> Iterator[Stack]:
    log = tmp_path_factory.mktemp("gateway") / "log"
    it = Stack(log)
    try:
        it.wait_until_ready(log)
        yield it
    finally:
        it.close()


@pytest.fixture(autouse=True)
def nothing_is_left(stack):
    stack.engine.reply = REPLY
    yield
    deadline = time.monotonic() + PATIENCE_S
    while stack.engine.held or len(stack.server.requests):
        assert time.monotonic() < deadline, "a request was not freed"
        time.sleep(0.01)


def test_the_model_is_listed_under_its_served_name(stack):
    assert [one.id for one in stack.client.models.list()] == [MODEL]


def test_a_chat_is_the_reply_with_its_thought_apart_and_its_tokens_counted(stack):
    answer = stack.chat()
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == (ANSWER, THOUGHT)
    assert answer.usage.completion_tokens == len(TOKENIZER.encode(REPLY))
    assert answer.usage.prompt_tokens == len(stack.engine.asked[-1].prompt)


def test_a_streamed_chat_is_the_same_in_pieces(stack):
    chunks = list(stack.chat(stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == THOUGHT
    assert sum(bool(delta.content) for delta in deltas) > 3
    assert chunks[-1].usage.completion_tokens == len(TOKENIZER.encode(REPLY))
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [end for end in ends if end] == ["length"]


@pytest.mark.parametrize("stream", [True, False])
def test_two_answers_come_apart(stack, stream):
    answer = stack.chat(n=2, stream=stream)
    texts = ["", ""]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += (choice.delta if stream else choice.message).content or ""
    assert texts == [ANSWER, ANSWER]


def test_options_of_sampling_arrive(stack):
    stack.chat(temperature=0.3, seed=5, max_tokens=9, presence_penalty=0.5, extra_body={"top_k": 7})
    sampling = stack.engine.asked[-1].sampling
    assert (sampling.temperature, sampling.seed, sampling.max_tokens) == (0.3, 5, 9)
    assert (sampling.presence_penalty, sampling.top_k) == (0.5, 7)
    assert sampling.top_p == INFO.default_sampling["top_p"]


def test_a_schema_arrives(stack):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    stack.chat(
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    )
    wanted = stack.engine.asked[-1].sampling.structured_outputs
    assert (wanted.kind, '"integer"' in wanted.text) == ("json", True)


def test_log_probabilities_come_with_the_content(stack):
    stack.engine.reply = f"<mm:think>{THOUGHT}</mm:think>Four, as ever."
    given = stack.chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert "".join(one.token for one in given) == "Four, as ever."
    assert {len(one.top_logprobs) for one in given} == {2}


def test_a_completion_streamed_and_whole(stack):
    stack.engine.reply = ANSWER
    ask = stack.client.completions.create
    whole = ask(model=MODEL, prompt="2 + 2 =", max_tokens=100)
    assert whole.choices[0].text == ANSWER
    pieces = ask(model=MODEL, prompt="2 + 2 =", max_tokens=100, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == ANSWER


def test_a_client_that_hangs_up_frees_the_engine(stack):
    stack.engine.reply = "word " * 1500
    with stack.chat(stream=True) as chunks:
        next(iter(chunks))
        assert stack.engine.held
    # `nothing_is_left` waits for it


@pytest.mark.parametrize(
    "content",
    [
        "word " * 3000,
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
    ],
)
def test_a_prompt_too_long_and_an_image_are_bad_requests(stack, content):
    with pytest.raises(openai.BadRequestError):
        stack.chat(messages=[{"role": "user", "content": content}])


def test_a_value_that_we_refuse_is_a_bad_request_with_our_sentence(stack):
    with pytest.raises(openai.BadRequestError) as error:
        stack.client.completions.create(
            model=MODEL, prompt="a", extra_body={"truncate_prompt_tokens": 1, "min_tokens": 99},
            max_tokens=2,
        )  # fmt: skip
    assert "min_tokens" in str(error.value)


def test_overload_is_told_as_such(stack):
    stack.engine.reply = "word " * 1500
    streams = [stack.chat(stream=True) for _ in range(2)]
    for stream in streams:
        next(iter(stream))
    with pytest.raises(openai.APIStatusError) as error:
        stack.chat()
    for stream in streams:
        stream.close()
    assert error.value.status_code == 429


def test_the_gateway_passes_on_load_and_flush(stack):
    root = stack.client.with_options(base_url=stack.url.removesuffix("/v1"))
    before = stack.engine.flushed
    root.post("/flush_cache", cast_to=object)
    assert stack.engine.flushed == before + 1
