"""Which gRPC status an error becomes: the gateway makes its HTTP codes of them."""

import grpc

from serving.engine_api import EngineBusyError, EngineError
from serving.scheduling.intake import QueueFullError

MAX_TEXT = 1000  # characters; statuses travel in headers, which clients limit to 8 KB


class Refused(RuntimeError):
    """A call that ends with this status and sentence."""

    def __init__(self, code: grpc.StatusCode, sentence: str):
        super().__init__(sentence)
        self.code = code


EXPECTED = (Refused, ValueError, QueueFullError, EngineBusyError, EngineError)
_CODES = {
    ValueError: grpc.StatusCode.INVALID_ARGUMENT,
    QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    EngineBusyError: grpc.StatusCode.FAILED_PRECONDITION,
    EngineError: grpc.StatusCode.INTERNAL,
}


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """The code and text for one of the `EXPECTED` errors."""
    text = str(error)
    text = text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."
    if isinstance(error, Refused):
        return error.code, text
    return next(code for kind, code in _CODES.items() if isinstance(error, kind)), text
