"""A model ready for use: weights, tokenizer, chat template, cache formats, and a drafter if it is
to speculate, from a bundled name, a folder or a hub name.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from configs.model import ModelConfig
from configs.parts import CacheFormat
from configs.speculative import SpeculativeConfig
from minimax_jax import checkpoint
from minimax_jax.batch import pack
from minimax_jax.cache import Cache, formats_of, local_heads, pool_layout
from minimax_jax.chat import ChatTemplate, Tokenizer
from minimax_jax.checkpoint.folder import read_target_config
from minimax_jax.drafter import Drafter
from minimax_jax.dummy_weights import check_load_format, dummy_model, dummy_speculation
from minimax_jax.lora import Adapter
from minimax_jax.model import Model
from minimax_jax.speculative.setup import (
    Speculation,
    config_of_load,
    drafted_config,
    load_speculation,
)
from minimax_jax.steps import bucket, score
from pallas_kernels.layouts.pool import CacheFormats, PoolLayout
from sharding.axes import DATA
from sharding.rules import SERVE, Rules

ASSETS = Path(__file__).parent / "assets"
SMALL_FILES = ("*.json", "*.jinja", "dspark/config.json")  # of a folder, all but the weights
_COMPUTE: dict[str, CacheFormat] = {"float32": "f32", "bfloat16": "bf16"}


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """What `load` returns. A folder without a tokenizer or template has None there, and a model
    that was not loaded to speculate has no drafter.
    """

    model: Model
    formats: CacheFormats
    folder: Path
    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    mesh: Mesh | None = None
    adapter: Adapter = None
    speculation: Speculation | None = None
    report: checkpoint.LoadReport | None = None

    @property
    def drafter(self) -> Drafter | None:
        """The drafter, if the model was loaded to speculate."""
        return None if self.speculation is None else self.speculation.drafter

    @property
    def config(self) -> ModelConfig:
        """The model's shape, with that of the drafter if one is loaded."""
        drafter = None if self.drafter is None else self.drafter.config
        return replace(self.model.config, drafter=drafter)

    def on_mesh(self) -> AbstractContextManager[Any]:
        """The context that steps of this model run in."""
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    @property
    def layout(self) -> PoolLayout:
        """The layout of a rank's pages, with a draft part if a drafter is loaded."""
        heads = local_heads(self.config, self.mesh, self.page_ranks)
        return pool_layout(self.config, self.formats, heads)

    @property
    def page_ranks(self) -> int:
        """How many neighbouring ranks share out the blocks of a context."""
        return self.model.rules.page_ranks

    @property
    def row_tokens(self) -> int:
        """Tokens of one row of the pool, on all ranks that share out a context: whoever owns pages
        by whole rows (`Cache.blocks_of`) need not know of those ranks.
        """
        return self.layout.block_size * self.page_ranks

    def pages(self, num_rows: int, width: int) -> tuple[Cache, Int[Array, "B P"]]:
        """Empty pages for so many sequences of `width` blocks, and their block table. Data ranks
        share the rows, and each counts its blocks from 0; rows that they cannot share all have.
        """
        data_ranks = 1 if self.mesh is None else self.mesh.shape[DATA]
        each = -(-width // self.page_ranks)
        of_rank = num_rows if num_rows % data_ranks else num_rows // data_ranks
        owned = jnp.arange(num_rows)[:, None] % of_rank * each + jnp.arange(each)
        cache = Cache.empty(self.layout, of_rank * each, self.mesh, self.page_ranks)
        return cache, cache.blocks_of(owned.astype(jnp.int32))


def load(
    name_or_path: str | Path,
    dtype: DTypeLike | None = None,
    kv: str | None = None,
    index: str | None = None,
    mesh: Mesh | None = None,
    revision: str | None = None,
    *,
    compute: str = "exact",
    speculative: SpeculativeConfig | bool = False,
    rules: Rules = SERVE,
    load_format: str = "auto",
    progress: Callable[[str, int], None] | None = None,
) -> LoadedModel:
    """Loads a bundled model ("tiny"), a folder, or a hub name ("MiniMaxAI/MiniMax-M3.1-Flash",
    `revision` as there).

    `dtype` is that of activations and plain weights: float32 on the CPU, bfloat16 elsewhere by
    default. `kv` and `index` ("f32", "bf16", "fp8", "nvfp4") are the cache formats; by default what
    the checkpoint's quantisation names, else the compute dtype. `compute` is "exact" or "e4m3"
    (`CacheFormats`). With `speculative` the drafter in the folder's `dspark/` is loaded too, whose
    cache has the config's `kv_cache_dtype` (fp8); without, that folder may hold anything. `rules`
    say where weights and activations lie on the mesh (`sharding.with_parallel`). With `load_format`
    "dummy" weights are random, in the formats that the config names, and none is read or fetched.

    Raises ValueError with one sentence, before anything is changed, for an unknown name, an
    impossible option or a damaged checkpoint.
    """
    default = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    dtype = jnp.dtype(default if dtype is None else dtype)
    if dtype.name not in _COMPUTE:
        raise ValueError(f"dtype {dtype.name} is not one of {', '.join(_COMPUTE)}")
    is_dummy, asked = load_format == "dummy", config_of_load(speculative)
    folder = find(name_or_path, revision, files=SMALL_FILES if is_dummy else ())
    config = read_target_config(folder) if asked is None else drafted_config(folder, asked)
    check_load_format(load_format, config.quantization)
    chosen = {"kv": kv, "index": index, "compute": compute}
    formats = _cache_formats(config, _COMPUTE[dtype.name], asked, **chosen)
    _check_pages(config, formats, mesh, rules, speculates=asked is not None)
    tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None
    template = ChatTemplate.load(folder) if ChatTemplate.is_in(folder) else None
    drafter_of = dummy_speculation if is_dummy else load_speculation
    speculation = None if asked is None else drafter_of(folder, config, asked, dtype, mesh)
    if is_dummy:
        model, report = dummy_model(replace(config, drafter=None), dtype, mesh, rules), None
    else:
        how = {"dtype": dtype, "mesh": mesh, "rules": rules, "progress": progress}
        model, report = checkpoint.load_model(folder, **how)
    return LoadedModel(
        model=model,
        formats=formats,
        folder=folder,
        tokenizer=tokenizer,
        template=template,
        mesh=mesh,
        speculation=speculation,
        report=report,
    )


def _cache_formats(
    config: ModelConfig, computed: CacheFormat, asked: SpeculativeConfig | None,
    *, kv: str | None, index: str | None, compute: str,
) -> CacheFormats:  # fmt: skip
    return replace(
        formats_of(config, computed, kv=kv, index=index),
        draft=computed if asked is None else asked.cache_format(computed),
        compute=compute,
    )


def _check_pages(
    config: ModelConfig, formats: CacheFormats, mesh: Mesh | None, rules: Rules, *, speculates: bool
) -> None:
    """Refuses, before any weight is read, formats that do not go together, heads that ranks cannot
    share, and a drafter whose pages they would share out.
    """
    pool_layout(config, formats, local_heads(config, mesh, rules.page_ranks))
    if speculates and rules.page_ranks > 1:
        raise ValueError("a drafter's pages cannot be split between dcp ranks: leave out split")


def find(
    name_or_path: str | Path, revision: str | None = None, *, files: Sequence[str] = ()
) -> Path:
    """The folder of a bundled name, a path, or a hub name (fetched, or taken from the hub's local
    cache). With `files`, names or patterns, nothing else of a hub name is fetched.
    """
    path = Path(name_or_path)
    bundled = ASSETS / str(name_or_path)
    name = str(name_or_path)
    is_bundled = len(path.parts) == 1 and (bundled / "config.json").is_file()
    if revision is not None and (is_bundled or path.is_dir()):
        raise ValueError(f"{name!r} is not a hub name, so it has no revision {revision!r}")
    if is_bundled:
        return bundled
    if path.is_dir():
        return path
    is_hub_name = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if not is_hub_name:
        known = ", ".join(sorted(p.parent.name for p in ASSETS.glob("*/config.json")))
        raise ValueError(
            f"{name!r} is neither a bundled model ({known}) nor a folder nor a hub name owner/model"
        )
    try:
        only = list(files) or None
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=only))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{name!r} could not be fetched from the hub: {reason}") from error


def logits(
    loaded: LoadedModel, tokens: np.ndarray | list[int], segment_ids: np.ndarray | None = None
) -> Float[Array, "T V"]:
    """float32 logits of every token of a pack [T], without a cache; padding ids are -inf.

    `segment_ids` marks runs that do not see each other (-1: padding); one segment by default. Keys
    are seen through the cache formats, so these are the logits that prefill and decode give, to
    rounding.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or not len(tokens):
        raise ValueError(f"tokens of shape {tokens.shape} are not a pack [T] of at least one token")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens of dtype {tokens.dtype} are not token ids")
    check_tokens(tokens, loaded.config)
    segments = np.zeros(len(tokens), int) if segment_ids is None else np.asarray(segment_ids)
    size = loaded.layout.block_size
    batch, places = pack(tokens, segments, size)
    tiles, width = (bucket(n) for n in batch.block_table.shape)
    batch, places = pack(tokens, segments, size, num_tiles=tiles, table_width=width)
    with loaded.on_mesh():
        out = score(loaded.model, loaded.adapter, batch, loaded.layout)
    return out.reshape(-1, out.shape[-1])[jnp.asarray(places)]


def save(loaded: LoadedModel, folder: str | Path, format: str | None = None) -> None:
    """Writes a complete checkpoint folder: weights ("m3.1", "mxfp8" or "bf16"; by default as they
    are in memory), config, tokenizer, template and whatever else the source folder held.
    """
    if loaded.adapter is not None:
        raise ValueError(
            "the model has an adapter, which a checkpoint does not hold: set it to None"
        )
    checkpoint.save_model(loaded.model, folder, format=format, source=loaded.folder)


def check_tokens(tokens: np.ndarray, config: ModelConfig) -> None:
    """Raises ValueError for an id outside the vocabulary."""
    bad = tokens[(tokens < 0) | (tokens >= config.num_tokens)]
    if len(bad):
        raise ValueError(f"token id {bad[0]} is not in 0..{config.num_tokens - 1}")
