"""Continuous batching: requests in, outputs out.

`BatchingEngine` is the face on the event loop. Its thread plans and runs steps (`step_loop`); what
comes back becomes tokens that count (`sequence`: stop strings, grammars), which reach their readers
through `streams`.
"""

from serving.engine.batching import BatchingEngine

__all__ = ["BatchingEngine"]
