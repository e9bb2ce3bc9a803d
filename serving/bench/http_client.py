"""The way over HTTP: /v1/completions or /v1/chat/completions of an OpenAI-compatible server.

Every chunk is asked to carry the usage so far: from it each event's tokens are counted, and the
gateway sends each at once then, whatever the served name (specification serving 1.4).
"""

import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from serving.bench.answers import Answer
from serving.bench.asks import Ask
from serving.bench.client import AskError, Facts
from serving.bench.options import Sampling, Target

PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
DONE = "[DONE]"
REASON_CHARACTERS = 300  # of an error's body
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")  # of a chat's delta


class HttpClient:
    """A pool of connections to one server."""

    def __init__(self, target: Target, sampling: Sampling):
        backend = "openai" if target.backend == "vllm" else target.backend
        self._is_chat = backend == "openai-chat"
        self._path = target.endpoint or PATHS[backend]
        self._model, self._sampling = target.model, sampling
        key = target.api_key
        self._http = httpx2.AsyncClient(
            base_url=base_url(target),
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            verify=_verify(target.ssl_ca_certs),
            timeout=target.request_timeout,
            limits=httpx2.Limits(max_connections=None),
            trust_env=False,  # a proxy in between would be measured too
        )

    async def facts(self) -> Facts:
        """From /v1/models: the model that was named, or the first."""
        async with _errors():
            response = await self._http.get("/v1/models")
        if response.status_code != 200:
            raise AskError(f"/v1/models: {_reason(response.status_code, response.text)}")
        models = {one["id"]: one for one in response.json().get("data") or ()}
        if not models:
            raise AskError("/v1/models: the server has no model yet")
        self._model = self._model or next(iter(models))
        own = models.get(self._model, {})
        return Facts(model=self._model, max_model_len=own.get("max_model_len"))

    async def ask(self, ask: Ask, answer: Answer) -> None:
        """Streams a completion."""
        body = self._body(ask)
        answer.sent = time.perf_counter()
        try:
            async with (
                _errors(),
                self._http.sse(self._path, method="POST", json=body) as events,
            ):
                await _check_status(events.response)
                async for event in events:
                    if event.data == DONE:
                        break
                    _take(answer, json.loads(event.data), time.perf_counter())
        finally:
            answer.ended = time.perf_counter()

    async def flush(self) -> None:
        """By /flush_cache, the gateway's, or /reset_prefix_cache, vLLM's."""
        async with _errors():
            response = await self._http.post("/flush_cache")
            if response.status_code == 404:
                response = await self._http.post("/reset_prefix_cache")
        if response.status_code != 200:
            raise AskError(_reason(response.status_code, response.text))

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    def _body(self, ask: Ask) -> dict[str, Any]:
        asked = self._sampling
        given = {
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "min_p": asked.min_p,
            "ignore_eos": True if ask.ignore_eos or asked.ignore_eos else None,
            "max_completion_tokens" if self._is_chat else "max_tokens": ask.max_tokens,
        }
        return {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **{name: value for name, value in given.items() if value is not None},
            **self._prompt(ask),
        }

    def _prompt(self, ask: Ask) -> dict[str, Any]:
        assert ask.text is not None
        if not self._is_chat:
            return {"prompt": ask.text}
        return {"messages": [{"role": one.role, "content": one.text} for one in ask.segments]}


def base_url(target: Target) -> str:
    """The server's address."""
    scheme = "http" if target.ssl_ca_certs is None else "https"
    return target.base_url or f"{scheme}://{target.host}:{target.port or 8000}"


def _take(answer: Answer, chunk: dict[str, Any], now: float) -> None:
    """One chunk. Raises AskError for an error that comes in place of one."""
    if "error" in chunk:
        raise AskError(str(chunk["error"])[:REASON_CHARACTERS])
    usage = chunk.get("usage") or {}
    for choice in chunk.get("choices") or ():
        if _has_text(choice):
            answer.note(now, 0)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    total = usage.get("completion_tokens", 0)
    if answer.times and total > sum(answer.counts):
        answer.counts[-1] += total - sum(answer.counts)
    answer.output_tokens = total or answer.output_tokens
    answer.prompt_tokens = usage.get("prompt_tokens") or answer.prompt_tokens
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    answer.cached_tokens = answer.cached_tokens if cached is None else cached
    details = usage.get("completion_tokens_details") or {}
    accepted = details.get("accepted_prediction_tokens") or 0
    rejected = details.get("rejected_prediction_tokens") or 0
    if accepted or rejected:
        answer.accepted_tokens, answer.draft_tokens = accepted, accepted + rejected


def _has_text(choice: dict[str, Any]) -> bool:
    if "text" in choice:
        return bool(choice["text"])
    delta = choice.get("delta") or {}
    return any(delta.get(name) for name in _TEXTS)


async def _check_status(response: httpx2.Response) -> None:
    if response.status_code != 200:
        await response.aread()
        raise AskError(_reason(response.status_code, response.text))


@asynccontextmanager
async def _errors() -> AsyncIterator[None]:
    """Makes what the library and the JSON raise an AskError."""
    try:
        yield
    except (httpx2.HTTPError, httpx2.InvalidURL, json.JSONDecodeError) as error:
        raise AskError(f"{type(error).__name__}: {error}") from error


def _verify(certificates: str | None) -> ssl.SSLContext | bool:
    if certificates is None:
        return True
    try:
        return ssl.create_default_context(cafile=certificates)
    except OSError as error:
        raise ValueError(f"ssl_ca_certs={certificates!r} cannot be read: {error}") from error


def _reason(status: int, body: str) -> str:
    return f"HTTP {status}: {body[:REASON_CHARACTERS]}"
