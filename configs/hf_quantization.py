"""`quantization_config` of a checkpoint <-> `QuantizationConfig`, in the keys of the released files
(spec/model 1.2-1.3).

What format a tensor really has, the checkpoint's own headers say; this names the policy and the
caches.
"""

from collections.abc import Mapping
from typing import Any

from configs.parts import CacheFormat, QuantizationConfig, WeightFormat

_KV_FORMATS: dict[str, CacheFormat] = {"FP8": "fp8", "NVFP4": "nvfp4"}


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
    has_nvfp4 = "nvfp4" in f"{section.get('moe_quant_algo', '')} {method} {algorithm}".lower()
    index = section.get("index_k_quant_type")
    # "FP8" beside NVFP4 index keys is what M3.1 computes in; its pages are NVFP4 (spec/model 7.20)
    kv = "nvfp4" if index == "nvfp4" else _KV_FORMATS.get(section.get("kv_cache_quant_algo", ""))
    return QuantizationConfig(
        projections=projections,
        experts="nvfp4" if mixed or has_nvfp4 else projections,
        kv_cache=kv,
        index_cache=index,
    )


def write(quantization: QuantizationConfig) -> dict[str, Any] | None:
    """The section that `read` gives back, or None for a plain checkpoint."""
    if quantization == QuantizationConfig():
        return None
    section: dict[str, Any] = {"activation_scheme": "dynamic", "weight_block_size": [1, 32]}
    if quantization.projections == "mxfp8":
        section |= {"quant_method": "mxfp8"}
    if quantization.experts == "nvfp4":
        nvfp4 = {"moe_quant_algo": "NVFP4", "moe_quant_format": "nvfp4-pack-quantized"}
        section |= {"group_size": 16, **nvfp4}
    if quantization.kv_cache is not None:
        section |= {"kv_cache_quant_algo": "FP8", "attention_quant_algo": "FP8"}
    if quantization.index_cache is not None:
        section |= {"index_k_quant_type": quantization.index_cache}
    return section
