"""The way over gRPC: token ids in and out, by `vllm.grpc.engine.VllmEngine`."""

import time
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as messages
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as services

from serving.bench.answers import Answer
from serving.bench.asks import Ask
from serving.bench.client import AskError, Facts
from serving.bench.options import Sampling, Target

FACTS_S = 5.0  # for a server to say what it is
FLUSH_S = 10.0  # for it to become idle, so that its cache can be dropped
SCHEME = "grpc://"
_OPTIONS = (("grpc.max_receive_message_length", -1),)


class GrpcClient:
    """A channel to one listener."""

    def __init__(self, target: Target, sampling: Sampling):
        address = target.base_url or f"{target.host}:{target.port or 50051}"
        self._channel = _channel(address.removeprefix(SCHEME), target.ssl_ca_certs)
        self._stub = services.VllmEngineStub(self._channel)
        key = target.api_key
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        self._timeout_s, self._sampling = target.request_timeout, sampling

    async def facts(self) -> Facts:
        """From GetModelInfo and GetServerInfo."""
        model = await self._call("GetModelInfo", messages.GetModelInfoRequest(), FACTS_S)
        server = await self._call("GetServerInfo", messages.GetServerInfoRequest(), FACTS_S)
        return Facts(
            model=model.served_model_name or model.model_path,
            max_model_len=model.max_context_length or None,
            vocab_size=model.vocab_size or None,
            stop_ids=tuple(model.eos_token_ids),
            block_size=server.block_size or None,
        )

    async def ask(self, ask: Ask, answer: Answer) -> None:
        """Streams Generate."""
        request = self._request(ask)
        answer.sent = time.perf_counter()
        call = self._stub.Generate(request, metadata=self._metadata, timeout=self._timeout_s)
        try:
            async for response in call:
                _take(answer, response, time.perf_counter())
        except grpc.aio.AioRpcError as error:
            raise AskError(_reason(error)) from error
        finally:
            answer.ended = answer.ended or time.perf_counter()
            call.cancel()  # which does nothing to one that has ended

    async def flush(self) -> None:
        """By FlushCache."""
        request = common.FlushCacheRequest(timeout_s=FLUSH_S)
        flushed = await self._call("FlushCache", request, FLUSH_S + FACTS_S)
        if not flushed.success:
            raise AskError(flushed.message)

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()

    async def _call(self, name: str, request: Any, timeout_s: float) -> Any:
        call = getattr(self._stub, name)
        try:
            return await call(request, metadata=self._metadata, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise AskError(f"{name}: {_reason(error)}") from error

    def _request(self, ask: Ask) -> Any:
        asked = self._sampling
        given = {
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "min_p": asked.min_p,
            "max_tokens": ask.max_tokens,
        }
        sampling = messages.SamplingParams(
            ignore_eos=ask.ignore_eos or asked.ignore_eos,
            **{name: value for name, value in given.items() if value is not None},
        )
        request = messages.GenerateRequest(
            request_id=ask.request_id, stream=True, sampling_params=sampling
        )
        if (ids := ask.ids) is not None:
            request.tokenized.input_ids.extend(ids)
        else:
            request.text = ask.text or ""
        return request


def _take(answer: Answer, response: Any, now: float) -> None:
    """One response; the totals stand in the last one, whose tokens a stream has sent before."""
    if response.WhichOneof("response") == "chunk":
        chunk = response.chunk
        if chunk.token_ids:
            answer.note(now, len(chunk.token_ids))
            answer.output_tokens += len(chunk.token_ids)
        _take_prompt(answer, chunk)
        return
    last = response.complete
    if last.output_ids and not answer.times:
        answer.note(now, len(last.output_ids))
        answer.output_tokens = len(last.output_ids)
    answer.ended, answer.finish_reason = now, last.finish_reason
    answer.draft_tokens, answer.accepted_tokens = last.spec_draft_tokens, last.spec_accepted_tokens
    _take_prompt(answer, last)
    if last.finish_reason in ("abort", "error"):
        raise AskError(f"the server ended it with {last.finish_reason!r}")


def _take_prompt(answer: Answer, part: Any) -> None:
    answer.prompt_tokens = part.prompt_tokens or answer.prompt_tokens
    answer.cached_tokens = max(part.cached_tokens, answer.cached_tokens or 0)


def _channel(address: str, certificates: str | None) -> grpc.aio.Channel:
    if certificates is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    try:
        roots = Path(certificates).read_bytes()
    except OSError as error:
        raise ValueError(f"ssl_ca_certs={certificates!r} cannot be read: {error}") from error
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(roots), options=_OPTIONS)


def _reason(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
