"""`quantization_config` of a checkpoint <-> `QuantizationConfig`, in the keys of the released files
(spec/model 1.2-1.3).

What format a tensor really has, the checkpoint's own headers say; this names the policy and the
caches.
"""

from collections.abc import Mapping
from typing import Any

from configs.parts import CacheFormat, QuantizationConfig, WeightFormat, check

_EXPERTS: dict[str, WeightFormat] = {"NVFP4": "nvfp4", "MXFP8": "mxfp8", "BF16": "bf16"}
_KV: dict[str, CacheFormat] = {"F32": "f32", "BF16": "bf16", "FP8": "fp8", "NVFP4": "nvfp4"}
STORAGE = "kv_cache_storage"  # our own key: how pages are stored, not what is computed with


def read(section: Mapping[str, Any] | None) -> QuantizationConfig:
    """The formats of MXFP8, M3.1 (MXFP8 with NVFP4 experts) and ModelOpt sections; plain without
    one.
    """
    if not section:
        return QuantizationConfig()
    method = str(section.get("quant_method", "")).lower()
    algorithm = str(section.get("quant_algo", "")).lower()
    mixed = "mixed_precision" in (method, algorithm)
    projections: WeightFormat = "mxfp8" if mixed or method == "mxfp8" else "bf16"
    experts = "nvfp4" if mixed or "nvfp4" in f"{method} {algorithm}" else projections
    index = section.get("index_k_quant_type")
    return QuantizationConfig(
        projections=projections,
        experts=_known(section, "moe_quant_algo", _EXPERTS, experts),
        kv_cache=section.get(STORAGE) or _kv_cache(section, index),
        index_cache=index,
    )


def write(quantization: QuantizationConfig) -> dict[str, Any] | None:
    """The section that `read` gives back, or None for a plain checkpoint."""
    if quantization == QuantizationConfig():
        return None
    section: dict[str, Any] = {"activation_scheme": "dynamic", "weight_block_size": [1, 32]}
    if quantization.projections == "mxfp8":
        section |= {"quant_method": "mxfp8"}
    if quantization.experts != quantization.projections:
        section |= {"moe_quant_algo": quantization.experts.upper()}
    if quantization.experts == "nvfp4":
        section |= {"group_size": 16, "moe_quant_format": "nvfp4-pack-quantized"}
    if quantization.kv_cache is not None:
        computed = "FP8" if quantization.kv_cache == "nvfp4" else quantization.kv_cache.upper()
        section |= {"kv_cache_quant_algo": computed, STORAGE: quantization.kv_cache}
    if quantization.index_cache is not None:
        section |= {"index_k_quant_type": quantization.index_cache}
    return section


def _kv_cache(section: Mapping[str, Any], index: str | None) -> CacheFormat | None:
    """What M3.1 names FP8 is what it computes in: beside NVFP4 index keys its pages are NVFP4
    (spec/model 7.20).
    """
    named = _known(section, "kv_cache_quant_algo", _KV, None)
    return "nvfp4" if index == "nvfp4" and named in ("fp8", None) else named


def _known(section: Mapping[str, Any], key: str, table: Mapping[str, Any], default: Any) -> Any:
    value = section.get(key)
    if value is None:
        return default
    check(str(value).upper() in table, f"{key} {value!r} is not one of {', '.join(table)}")
    return table[str(value).upper()]
