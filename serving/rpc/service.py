"""The gRPC service `vllm.grpc.engine.VllmEngine` over an engine (specification serving 1.3)."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as messages
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as services

from minimax_jax.chat import Tokenizer
from serving.engine_api import Engine, EngineBusyError, EngineError, Output
from serving.rpc import tokenizer_zip, wire_request, wire_response, wire_state
from serving.rpc.open_requests import OpenRequest, OpenRequests
from serving.rpc.profile_request import profile
from serving.rpc.statuses import Refused
from serving.rpc.tokenizer_zip import TokenizerZip
from serving.rpc.wire_state import Served

NAME: str = messages.DESCRIPTOR.services_by_name["VllmEngine"].full_name
HEARTBEAT_S = 1.0  # between load records on a stream of KV events when nothing happens
MAX_FLUSH_WAIT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """What of a model the server reads itself: a tokenizer for prompts that come as text, and the
    folder whose tokenizer files it hands out.
    """

    folder: Path | None = None
    tokenizer: Tokenizer | None = None


class Service(services.VllmEngineServicer):
    """One served name. Methods raise what the `Door` knows; a stream that is cancelled and an
    `Abort` both free what the request holds.
    """

    def __init__(
        self,
        engine: Engine,
        served: Served,
        files: ModelFiles,
        requests: OpenRequests,
        *,
        profile_dir: str | None = None,
    ):
        self._engine, self._served, self._files = engine, served, files
        self._requests, self._profile_dir = requests, profile_dir
        self._started, self._last_request = time.monotonic(), 0.0
        self._zip: TokenizerZip | None = None
        self._packing = asyncio.Lock()

    async def Generate(self, request: Any, context: Any) -> None:
        """Streams the tokens of a prompt's continuations."""
        self._last_request = time.time()
        wire_request.check_supported(request)
        request.request_id = request.request_id or uuid4().hex
        with self._requests.answering(request.request_id) as open_request:
            asked = wire_request.asked(
                request,
                await self._prompt(request),
                eos_token_ids=self._engine.info.eos_token_ids,
                vocab_size=self._engine.info.vocab_size,
                adapter=self._served.adapter,
            )
            _check_begins(open_request)
            outputs = self._engine.submit(asked)
            respond = wire_response.answerer(request.stream)
            left = asked.sampling.n
            try:
                async for output in outputs:
                    _check_whole(output)
                    left -= output.finish_reason is not None
                    for response in respond(output):
                        await context.write(response)
                if left:
                    raise EngineError(f"{left} of {asked.sampling.n} sequences have no end")
            finally:
                if left:
                    self._engine.abort(asked.request_id)

    async def Abort(self, request: Any, context: Any) -> Any:
        """Ends requests of this listener; unknown ids have ended already."""
        for request_id in request.request_ids:
            if self._requests.abort(request_id):
                self._engine.abort(request_id)
        return messages.AbortResponse()

    async def Embed(self, request: Any, context: Any) -> Any:
        """Refused: there are no embeddings."""
        text = "embeddings are not supported: this model generates text"
        raise Refused(grpc.StatusCode.UNIMPLEMENTED, text)

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        """Whether requests are taken, and if not, why."""
        state = self._engine.state
        if self._requests.is_closing:
            return messages.HealthCheckResponse(healthy=False, message="shutting down")
        return messages.HealthCheckResponse(healthy=state.is_healthy, message=state.message)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        """What the model is."""
        return wire_state.model_info(self._served, self._engine.info)

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        """How the model is served."""
        info = wire_state.server_info(self._engine.info)
        info.active_requests = len(self._requests)
        info.is_paused = self._engine.state.is_paused
        info.last_receive_timestamp = self._last_request
        info.uptime_seconds = time.monotonic() - self._started
        return info

    async def GetLoads(self, request: Any, context: Any) -> Any:
        """The load of each data rank or of one; only core metrics, whatever is to be included."""
        loads = self._engine.loads()
        if request.HasField("dp_rank"):
            loads = [load for load in loads if load.rank == request.dp_rank]
            if not loads:
                last = self._engine.info.data_parallel_size - 1
                raise ValueError(f"dp_rank={request.dp_rank} is not in 0..{last}")
        return wire_state.loads(loads)

    async def GetTokenizer(self, request: Any, context: Any) -> None:
        """Streams the tokenizer files as one archive, its SHA-256 with the last piece."""
        packed = await self._tokenizer_zip()
        pieces = list(packed.pieces())
        for place, piece in enumerate(pieces, 1):
            digest = packed.sha256 if place == len(pieces) else ""
            await context.write(common.GetTokenizerChunk(data=piece, sha256=digest))

    async def FlushCache(self, request: Any, context: Any) -> Any:
        """Drops the prefix cache, if the engine is idle by then."""
        if not 0 <= request.timeout_s <= MAX_FLUSH_WAIT_S:
            raise ValueError(f"timeout_s={request.timeout_s} is not in 0..{MAX_FLUSH_WAIT_S:g}")
        try:
            await self._engine.flush(request.timeout_s)
        except EngineBusyError as error:
            return common.FlushCacheResponse(success=False, message=str(error))
        return common.FlushCacheResponse(success=True, message="the prefix cache is empty")

    async def StartProfile(self, request: Any, context: Any) -> Any:
        """Begins a profile."""
        wanted = profile(request, self._profile_dir)
        try:
            await self._engine.start_profile(wanted)
        except EngineBusyError as error:
            return common.ProfileResponse(success=False, message=str(error))
        return common.ProfileResponse(success=True, message=f"profiling into {wanted.folder}")

    async def StopProfile(self, request: Any, context: Any) -> Any:
        """Ends the profile and writes it."""
        try:
            folder = await self._engine.stop_profile()
        except EngineBusyError as error:
            return common.ProfileResponse(success=False, message=str(error))
        return common.ProfileResponse(success=True, message=f"the profile is in {folder}")

    async def SubscribeKvEvents(self, request: Any, context: Any) -> None:
        """Streams what happens to the blocks of the prefix cache, each batch with its rank's load,
        and the loads alone while nothing happens.
        """
        if self._engine.kv_events is None:
            text = "KV events are not recorded: enable_kv_cache_events is off"
            raise Refused(grpc.StatusCode.UNIMPLEMENTED, text)
        await context.send_initial_metadata(())
        async with aclosing(self._kv_batches(request)) as batches:
            async for batch in batches:
                await context.write(batch)

    async def _kv_batches(self, request: Any) -> AsyncGenerator[Any]:
        feed, sample, last = self._engine.kv_events, 0, 0
        assert feed is not None
        takes_early = request.load_records_before_first_batch
        async with aclosing(feed.subscribe(request.start_sequence_number, HEARTBEAT_S)) as batches:
            async for batch in batches:
                sample += 1
                loads = {load.rank: load for load in self._engine.loads()}
                if batch is not None:
                    last = batch.number
                    yield wire_state.kv_batch(batch, loads.get(batch.rank), sample)
                elif last or takes_early:
                    for load in loads.values():
                        yield wire_state.load_alone(load, last, sample)

    async def _prompt(self, request: Any) -> list[int]:
        if request.WhichOneof("input") == "tokenized":
            return list(request.tokenized.input_ids)
        if self._files.tokenizer is None:
            raise ValueError(
                "the prompt is a text, but this model has no tokenizer: send token ids"
            )
        return await asyncio.to_thread(self._files.tokenizer.encode, request.text)

    async def _tokenizer_zip(self) -> TokenizerZip:
        async with self._packing:
            if self._zip is None:
                if self._files.folder is None:
                    raise Refused(grpc.StatusCode.NOT_FOUND, "this model has no tokenizer files")
                try:
                    self._zip = await asyncio.to_thread(tokenizer_zip.pack, self._files.folder)
                except ValueError as error:
                    raise Refused(grpc.StatusCode.NOT_FOUND, str(error)) from error
            return self._zip


def _check_begins(request: OpenRequest) -> None:
    """Raises Refused for a request that was aborted while its prompt was being read."""
    if request.is_aborted:
        raise Refused(grpc.StatusCode.CANCELLED, "the request was aborted before it began")


def _check_whole(output: Output) -> None:
    """Raises EngineError for a sequence that ended by a fault."""
    if output.finish_reason == "error":
        raise EngineError(output.error or f"the engine could not finish sequence {output.index}")
