"""The `smg` gateway with an engine behind it that answers what it is told.

The gateway detokenises and parses; the engine is the least of the gRPC contract that it needs
(specification serving 1.2-1.4): health, model, tokenizer, and a stream of token ids.
"""

import hashlib
import io
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from minimax_jax.chat import Tokenizer
from tests.chat.folders import TINY

grpc = pytest.importorskip("grpc")
messages = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2")
services = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2_grpc")
common = pytest.importorskip("smg_grpc_proto.generated.common_pb2")

MODEL = "stub"  # under a name that matches `minimax*` deltas are merged until they are long
READY_SECONDS = 60
# The least in which the gateway recognises who decides about the thought: by this comparison.
TEMPLATE = """{%- for message in messages -%}
]~b]{{ message.role }}\n{{ message.content }}[e~[\n{%- endfor -%}
]~b]ai\n{% if thinking_mode == "enabled" %}<mm:think>{% endif %}"""


class Engine(services.VllmEngineServicer):
    """Answers `text`, a token at a time."""

    def __init__(self) -> None:
        self.text = ""
        self._tokenizer = Tokenizer.load(TINY)

    def HealthCheck(self, request: Any, context: Any) -> Any:
        return messages.HealthCheckResponse(healthy=True)

    def GetModelInfo(self, request: Any, context: Any) -> Any:
        return messages.GetModelInfoResponse(
            model_path=MODEL,
            served_model_name=MODEL,
            is_generation=True,
            max_context_length=1 << 20,
            vocab_size=self._tokenizer.num_tokens,
            eos_token_ids=self._tokenizer.stop_ids,
        )

    def GetServerInfo(self, request: Any, context: Any) -> Any:
        return messages.GetServerInfoResponse(server_type="vllm")

    def GetTokenizer(self, request: Any, context: Any) -> Iterator[Any]:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
                archive.write(TINY / name, name)
            archive.writestr("chat_template.jinja", TEMPLATE)
        data, size = buffer.getvalue(), 1 << 16
        for start in range(0, len(data), size):
            last = start + size >= len(data)
            digest = hashlib.sha256(data).hexdigest() if last else ""
            yield common.GetTokenizerChunk(data=data[start : start + size], sha256=digest)

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:
        ids = self._tokenizer.encode(self.text)
        if request.stream:
            for token_id in ids:
                chunk = messages.GenerateStreamChunk(token_ids=[token_id], completion_tokens=1)
                yield messages.GenerateResponse(chunk=chunk)
            ids = []
        complete = messages.GenerateComplete(
            output_ids=ids, finish_reason="stop", completion_tokens=len(ids)
        )
        yield messages.GenerateResponse(complete=complete)


class Gateway:
    """A running gateway; `close` ends it and the engine."""

    def __init__(self, log: Path, engine: Engine | None = None):
        self.engine = engine or Engine()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        services.add_VllmEngineServicer_to_server(self.engine, self._server)
        engine_port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        port, metrics_port = _free_port(), _free_port()
        self._url = f"http://127.0.0.1:{port}/v1/chat/completions"
        command = [
            *(_program(), "launch", "--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-port", str(metrics_port)),
            *("--worker-urls", f"grpc://127.0.0.1:{engine_port}"),
            *("--reasoning-parser", "minimax_m3", "--tool-call-parser", "minimax_m3"),
        ]
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self._log = log
        self._wait()

    def ask(self, text: str, **request: Any) -> dict[str, Any]:
        """The message that the gateway makes of `text`."""
        with self._open(text, stream=False, **request) as response:
            return json.load(response)["choices"][0]["message"]

    def stream(self, text: str, **request: Any) -> list[dict[str, Any]]:
        """The same as deltas."""
        deltas = []
        with self._open(text, stream=True, **request) as response:
            for line in response:
                data = line.decode().removeprefix("data:").strip()
                if data and data != "[DONE]":
                    deltas += [choice["delta"] for choice in json.loads(data)["choices"]]
        return deltas

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._server.stop(0).wait()

    def _open(self, text: str, **request: Any) -> Any:
        self.engine.text = text
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **request}
        headers = {"content-type": "application/json"}
        return urllib.request.urlopen(
            urllib.request.Request(self._url, json.dumps(body).encode(), headers), timeout=30
        )

    def _wait(self) -> None:
        """Until it has found the engine and built the tokenizer."""
        deadline = time.monotonic() + READY_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                self.ask("ready")
                return
            except urllib.error.HTTPError as error:
                error.close()
                time.sleep(0.2)
            except urllib.error.URLError:
                time.sleep(0.2)
        self.close()
        raise RuntimeError(f"the gateway did not start:\n{self._log.read_text()[-3000:]}")


def _program() -> str:
    found = shutil.which("smg", path=str(Path(sys.executable).parent)) or shutil.which("smg")
    assert found, "the package smg has no program"
    return found


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
