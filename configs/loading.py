"""How a checkpoint is read for serving, under the names of vLLM's flags."""

from dataclasses import dataclass
from typing import Literal

from configs.cli import described
from configs.parts import CacheFormat, check

CACHE_DTYPES: dict[str, CacheFormat | None] = {
    "auto": None,
    "float32": "f32",
    "bfloat16": "bf16",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "nvfp4": "nvfp4",
}


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Which revision of a model, in which formats; "auto" is what the checkpoint names."""

    load_format: Literal["auto", "dummy"] = described(
        "auto", 'dummy: random weights in the formats of config.json, none read ("auto": all read)'
    )
    revision: str | None = described(None, "branch, tag or commit of a hub name")
    dtype: Literal["auto", "float32", "bfloat16"] = described("auto", "of activations")
    kv_cache_dtype: str = described("auto", f"of cached keys and values: {', '.join(CACHE_DTYPES)}")
    indexer_kv_dtype: str = described("auto", "of cached index keys: the same choices")

    def __post_init__(self) -> None:
        for name in ("kv_cache_dtype", "indexer_kv_dtype"):
            value = getattr(self, name)
            check(
                value in CACHE_DTYPES, f"{name}={value!r} is not one of {', '.join(CACHE_DTYPES)}"
            )

    @property
    def kv(self) -> CacheFormat | None:
        """The format of cached keys and values; None is the checkpoint's."""
        return CACHE_DTYPES[self.kv_cache_dtype]

    @property
    def index(self) -> CacheFormat | None:
        """The format of cached index keys; None is the checkpoint's."""
        return CACHE_DTYPES[self.indexer_kv_dtype]
