"""What the keys of vLLM's JSON options mean here: fields of our configs, a line, or a refusal."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from configs.speculative import SpeculativeConfig

# What objects come to: values of config fields, and lines about what was accepted.
Meaning = tuple[dict[str, Any], list[str]]


def attention(options: Mapping[str, Any]) -> Meaning:
    """`--attention-config`: the format of the index keys, and who scores which blocks of them."""
    _check_keys("attention-config", options, ("backend", "indexer_kv_dtype", "indexer_decode_cp"))
    fields, lines = {}, []
    if "indexer_kv_dtype" in options:
        fields["indexer_kv_dtype"] = options["indexer_kv_dtype"]
    if "indexer_decode_cp" in options:
        given = options["indexer_decode_cp"]
        if not isinstance(given, bool):
            raise ValueError(f"indexer_decode_cp={given!r} is neither true nor false")
        fields["indexer_decode_cp"] = given
    if "backend" in options:
        lines.append(f"--attention-config.backend {options['backend']}: {DISPATCH}")
    return fields, lines


def kv_events(options: Mapping[str, Any]) -> Meaning:
    """`--kv-events-config`: on or off; they are read from the gRPC stream SubscribeKvEvents."""
    _check_keys("kv-events-config", options, ("enable_kv_cache_events", "publisher"))
    publisher = options.get("publisher", "grpc")
    if publisher not in ("grpc", "null"):
        raise ValueError(f"kv-events-config has publisher={publisher!r}, but gRPC alone is there")
    on = options.get("enable_kv_cache_events", True)
    if not isinstance(on, bool):
        raise ValueError(f"enable_kv_cache_events={on!r} is neither true nor false")
    return {"enable_kv_cache_events": on}, []


def kv_transfer(options: Mapping[str, Any]) -> Meaning:
    """`--kv-transfer-config`: refused."""
    connector = options.get("kv_connector")
    raise ValueError(
        f"--kv-transfer-config with kv_connector={connector!r} is not supported: this engine "
        "prefills and decodes itself"
    )


def structured(options: Mapping[str, Any]) -> Meaning:
    """`--structured-outputs-config`: one backend."""
    _check_keys("structured-outputs-config", options, ("backend",))
    backend = options.get("backend", "auto")
    line = f"--structured-outputs-config.backend {backend}: llguidance makes the masks"
    return {}, [] if backend in ("auto", "guidance", "llguidance") else [line]


def compilation(options: Mapping[str, Any]) -> Meaning:
    """`--compilation-config`: nothing to choose."""
    return {}, ["--compilation-config: all shapes are compiled before the server is ready"]


def multimodal_limits(options: Mapping[str, Any]) -> Meaning:
    """`--limit-mm-per-prompt`: nothing but zero."""
    wanted = {kind: number for kind, number in options.items() if number not in (0, "0")}
    if wanted:
        raise ValueError(f"--limit-mm-per-prompt {json.dumps(wanted)}: only text is supported")
    return {}, ["--limit-mm-per-prompt: there is text alone"]


def quantization(options: Mapping[str, Any]) -> Meaning:
    """`--quantization-config`: the format of the experts, which the checkpoint must have."""
    _check_keys("quantization-config", options, ("moe",))
    return {"moe": options["moe"]} if "moe" in options else {}, []


def speculative(options: Mapping[str, Any], model: str) -> SpeculativeConfig:
    """`--speculative-config`. The drafter is the one in the checkpoint's own `dspark/`; another
    `model` is refused.
    """
    options = dict(options)
    drafter = options.pop("model", model)
    if drafter not in (model, f"{model}/dspark"):
        raise ValueError(
            f"--speculative-config has model={drafter!r}, but the drafter is that of {model}"
        )
    return SpeculativeConfig.parse(json.dumps(options))


DISPATCH = "dispatch chooses the kernels"
MEANINGS: dict[str, Callable[[Mapping[str, Any]], Meaning]] = {
    "attention-config": attention,
    "kv-events-config": kv_events,
    "kv-transfer-config": kv_transfer,
    "structured-outputs-config": structured,
    "compilation-config": compilation,
    "limit-mm-per-prompt": multimodal_limits,
    "quantization-config": quantization,
}


def meaning(objects: Mapping[str, Mapping[str, Any]]) -> Meaning:
    """What all of them say but `speculative-config`."""
    fields: dict[str, Any] = {}
    lines: list[str] = []
    for name, options in objects.items():
        if name in MEANINGS:
            more, said = MEANINGS[name](options)
            fields, lines = fields | more, lines + said
    return fields, lines


def _check_keys(name: str, options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = [key for key in options if key not in known]
    if unknown:
        raise ValueError(f"--{name} has no {', '.join(unknown)}; it has {', '.join(known)}")
