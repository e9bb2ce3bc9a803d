"""Policy: which weights are stored in which format, and a whole model taken from one to another.

    format   routed experts                   q k v o, index q k, dense and shared MLP   all else
    m3.1     NVFP4, an outer scale for each   MXFP8                                      plain
             expert and projection
    mxfp8    MXFP8                            MXFP8                                      plain
    bf16     bf16                             bf16                                       plain

All else is embedding, head, norms, and the router, which is float32 in every format (F93).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dispatch import refuse_device
from pallas_kernels.layouts import mxfp8, nvfp4
from pallas_kernels.layouts.mxfp8 import MXFP8Tensor
from pallas_kernels.layouts.nvfp4 import NVFP4Tensor
from pallas_kernels.layouts.nvfp4_pages import NVFP4Pages, fits, to_tensor

Format = Literal["m3.1", "mxfp8", "bf16"]
Form = Literal["plain", "mxfp8", "nvfp4"]
Weight = Any  # a jax or numpy array, MXFP8Tensor, NVFP4Tensor or NVFP4Pages

FORMATS: tuple[Format, ...] = ("m3.1", "mxfp8", "bf16")
_EXPERT_FORM: dict[str, Form] = {"m3.1": "nvfp4", "mxfp8": "mxfp8", "bf16": "plain"}
_PROJECTION_FORM: dict[str, Form] = {"m3.1": "mxfp8", "mxfp8": "mxfp8", "bf16": "plain"}
M = TypeVar("M", bound=nnx.Module)  # the target, or its drafter


def as_format(name: str) -> Format:
    """The format of this name; ValueError unless it is one of FORMATS."""
    for known in FORMATS:
        if name == known:
            return known
    raise ValueError(f"format {name!r} is not one of {', '.join(FORMATS)}")


def is_router(path: str) -> bool:
    """Whether a parameter is float32 wherever it is stored."""
    return ".router." in path


def is_expert(path: str) -> bool:
    """Whether a parameter is a stack of routed experts' matrices."""
    return ".experts." in path


def is_projection(path: str) -> bool:
    """Whether a parameter is a matrix that the formats quantise, experts apart."""
    return path.endswith("_proj.weight")


def form_in(path: str, name: Format) -> Form:
    """The form of a parameter (by its path, as in `names`) in a format."""
    if is_expert(path):
        return _EXPERT_FORM[name]
    return _PROJECTION_FORM[name] if is_projection(path) else "plain"


def form_of(weight: Weight) -> Form:
    """The form that a weight has, in whatever order its bytes are."""
    if isinstance(weight, (NVFP4Tensor, NVFP4Pages)):
        return "nvfp4"
    return "mxfp8" if isinstance(weight, MXFP8Tensor) else "plain"


@partial(jax.jit, static_argnames="form")
def to_form(weight: Weight, form: Form) -> Weight:
    """A weight in a form and in the checkpoint's order (see `has_kernel_order`), as it
    is if it has that form already; plain is float32.

    NVFP4 gets the released checkpoints' outer scale, which divides (2688 / amax of each matrix, one
    rounding after 1 / (amax / 2688)), so that it is written and read back bit for bit.
    """
    if isinstance(weight, NVFP4Pages):
        weight = to_tensor(weight)
    if form == form_of(weight):
        return weight
    values = weight if form_of(weight) == "plain" else weight.dequantize(jnp.float32)
    if form == "mxfp8":
        return mxfp8.quantize(values)
    if form == "nvfp4":
        return with_dividing_scale(nvfp4.quantize(values))
    return values


def has_kernel_order(path: str, weight: Weight) -> bool:
    """Whether this device's kernels read a weight in another order than the checkpoint's: routed
    experts in NVFP4 do, as pages. The values are the same bit for bit, and `to_form` brings the
    checkpoint's order back.
    """
    is_candidate = is_expert(path) and isinstance(weight, NVFP4Tensor) and fits(weight)
    return is_candidate and refuse_device() is None


def with_dividing_scale(tensor: NVFP4Tensor) -> NVFP4Tensor:
    """The tensor in compressed-tensors' convention; its outer scale is rounded if it multiplied."""
    return NVFP4Tensor(tensor.codes, tensor.scales, nvfp4.encode_scale(tensor), divides=True)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def seen_through(weight: Float[Array, "..."], form: Form) -> Float[Array, "..."]:
    """A plain weight as its stored form gives it back; the gradient passes straight through."""
    if form == "plain":
        return weight
    return to_form(weight, form).dequantize(weight.dtype)


@seen_through.defjvp
def _straight_through(form: Form, primals, tangents):
    return seen_through(primals[0], form), tangents[0]


def quantize_model(model: M, name: str) -> M:
    """The model with its weights stored in a format. What a format leaves plain stays as it is,
    except that `bf16` makes everything but the router bfloat16.
    """
    chosen = as_format(name)
    if chosen == "bf16":
        return dequantize_model(model, jnp.bfloat16)
    return _map(lambda path, weight: to_form(weight, form_in(path, chosen)), model)


def dequantize_model(model: M, dtype: DTypeLike = jnp.float32) -> M:
    """The model with plain weights of one dtype; the router stays float32."""

    def plain(path: str, weight: Weight) -> Array:
        kept = jnp.float32 if is_router(path) else dtype
        return to_form(weight, "plain").astype(kept)

    return _map(plain, model)


def fake_quantize_model(model: M, name: str) -> M:
    """The whole model seen through its storage format, with straight-through gradients.

    Plain weights keep their dtype; weights that are quantised already stay. What `quantize_model`
    stores of the same model has exactly these values (in float32).
    """
    chosen = as_format(name)

    def seen(path: str, weight: Weight) -> Weight:
        plain = form_of(weight) == "plain"
        return seen_through(weight, form_in(path, chosen)) if plain else weight

    return _map(seen, model)


def path_of_leaf(keys: tuple[Any, ...]) -> str:
    """A parameter's path, such as `layers.3.mlp.router.weight`, from JAX's key path."""
    parts = [
        str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", "")))) for key in keys
    ]
    return ".".join(parts).removesuffix(".value")


def _map(function: Callable[[str, Weight], Weight], model: M) -> M:
    return jax.tree_util.tree_map_with_path(
        lambda keys, weight: function(path_of_leaf(keys), weight),
        model,
        is_leaf=lambda node: isinstance(node, (MXFP8Tensor, NVFP4Tensor, NVFP4Pages)),
    )
