"""Who runs when: continuous batching, behind gRPC or offline.

from serving import LLM, SamplingParams
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving.offline.llm import LLM
    from serving.scheduling.sampling_params import SamplingParams, StructuredOutput

# Read when they are asked for: the scheduler is of use without jax, and starts without it.
_HOMES = {
    "LLM": "serving.offline",
    "SamplingParams": "serving.scheduling.sampling_params",
    "StructuredOutput": "serving.scheduling.sampling_params",
}
__all__ = ["LLM", "SamplingParams", "StructuredOutput"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'serving' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
