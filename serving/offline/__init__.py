"""Generation without a server: `LLM`, as vLLM's users know it."""

from serving.offline.llm import LLM
from serving.offline.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput"]
