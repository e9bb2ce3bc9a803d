"""What an engine and its model are, do and hold, as the protocol's messages."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as messages

from serving.engine_api import EngineInfo, RankLoad
from serving.kv_feed import KvBatch
from serving.scheduling.kv_events import BlocksRemoved, BlocksStored, KvEvent

SERVER_TYPE = "vllm-grpc"  # what the protocol calls a worker of this service
_TIER = common.KV_CACHE_TIER_DEVICE


@dataclass(frozen=True, kw_only=True)
class Served:
    """The name under which a listener serves the engine's model, or an adapter of it."""

    name: str
    model_path: str
    adapter: str | None = None


def model_info(served: Served, info: EngineInfo) -> Any:
    """The `GetModelInfoResponse`: also from what the gateway refuses prompts and images by."""
    return messages.GetModelInfoResponse(
        model_path=served.model_path,
        served_model_name=served.name,
        tokenizer_path=served.model_path,
        is_generation=True,
        supports_vision=False,
        max_context_length=info.max_model_len,
        max_req_input_len=info.max_model_len - 1,
        vocab_size=info.vocab_size,
        model_type=info.model_type,
        architectures=info.architectures,
        eos_token_ids=info.eos_token_ids,
        pad_token_id=info.pad_token_id or 0,
        bos_token_id=info.bos_token_id or 0,
        default_sampling_params_json=json.dumps(dict(info.default_sampling)),
    )


def server_info(info: EngineInfo) -> Any:
    """The `GetServerInfoResponse` but for what changes while the server runs."""
    start = "after_reasoning" if info.grammar_waits_for_thought else "first_token"
    return messages.GetServerInfoResponse(
        server_type=SERVER_TYPE,
        data_parallel_size=info.data_parallel_size,
        block_size=info.block_size,
        kv_cache_dtype=info.kv_cache_dtype,
        model_dtype=info.model_dtype,
        attention_backend=info.attention_backend,
        max_num_seqs=info.max_num_seqs,
        engine_reasoning_parser=info.reasoning_parser,
        constrained_decoding_start=start,
    )


def loads(given: Sequence[RankLoad]) -> Any:
    """The `GetLoadsResponse` of these ranks."""
    return messages.GetLoadsResponse(
        timestamp=datetime.now(UTC).isoformat(),
        version=version("minimax-jax"),
        dp_rank_count=len(given),
        loads=[_load(one) for one in given],
    )


def _load(load: RankLoad) -> Any:
    return messages.SchedulerLoad(
        dp_rank=load.rank,
        num_running_reqs=load.num_running,
        num_waiting_reqs=load.num_waiting,
        num_total_reqs=load.num_running + load.num_waiting,
        num_used_tokens=load.used_tokens,
        max_total_num_tokens=load.max_tokens,
        token_usage=load.token_usage,
        gen_throughput=load.tokens_per_second,
        cache_hit_rate=load.cache_hit_rate,
        utilization=load.num_running / load.max_running if load.max_running else 0.0,
        max_running_requests=load.max_running,
        num_waiting_uncached_tokens=load.waiting_uncached_tokens,
    )


def kv_batch(batch: KvBatch, load: RankLoad | None, sample: int) -> Any:
    """A `KvEventBatch` with the load of its rank; events are numbered in it from 1."""
    return common.KvEventBatch(
        sequence_number=batch.number,
        timestamp=batch.timestamp,
        dp_rank=batch.rank,
        events=[_kv_event(event, i) for i, event in enumerate(batch.events, 1)],
        load=None if load is None else _engine_load(load, sample),
    )


def load_alone(load: RankLoad, last: int, sample: int) -> Any:
    """A `KvEventBatch` of a load and no events, under the number of the last one that had some."""
    record = _engine_load(load, sample)
    record.load_only = True
    return common.KvEventBatch(
        sequence_number=last, timestamp=time.time(), dp_rank=load.rank, load=record
    )


def _engine_load(load: RankLoad, sample: int) -> Any:
    return common.EngineLoad(
        running_requests=load.num_running,
        waiting_requests=load.num_waiting,
        waiting_uncached_tokens=load.waiting_uncached_tokens,
        token_usage=load.token_usage,
        active_token_usage=load.token_usage,
        gen_throughput=load.tokens_per_second,
        max_running_requests=load.max_running,
        cache_hit_rate=load.cache_hit_rate,
        num_used_tokens=load.used_tokens,
        max_total_num_tokens=load.max_tokens,
        sample=sample,
    )


def _kv_event(event: KvEvent, event_id: int) -> Any:
    if isinstance(event, BlocksStored):
        return common.KvCacheEvent(event_id=event_id, stored=_stored(event))
    if isinstance(event, BlocksRemoved):
        removed = common.KvBlocksRemoved(block_hashes=event.block_ids, tier=_TIER)
        return common.KvCacheEvent(event_id=event_id, removed=removed)
    return common.KvCacheEvent(event_id=event_id, cleared=common.KvCacheCleared())


def _stored(event: BlocksStored) -> Any:
    size = event.block_size
    blocks = [
        common.KvBlock(
            block_hash=block_id,
            token_ids=event.token_ids[place * size : (place + 1) * size],
            block_size=size,
        )
        for place, block_id in enumerate(event.block_ids)
    ]
    return common.KvBlocksStored(
        blocks=blocks,
        parent_block_hash=event.parent_id,
        tier=_TIER,
        lora_name=event.adapter,
        cache_salt=event.cache_salt or None,
    )
