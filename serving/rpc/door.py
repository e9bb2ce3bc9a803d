"""What every call passes first: the bearer token, the parsing of its bytes, and the way in which
errors leave.

Probes of `grpc.health.v1` need no token, because a cluster's do not carry one.
"""

import hmac
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from configs.server import ServerConfig
from serving.rpc.statuses import EXPECTED, status_of

OPEN_SERVICE = "/grpc.health.v1.Health/"


class Door(grpc.aio.ServerInterceptor):
    """Lets calls with the token in, and guards the methods of one service.

    A guarded method gets a parsed message and may raise any of the `EXPECTED` errors. Bytes that
    are no message are INVALID_ARGUMENT.
    """

    def __init__(self, service: str, token: str | None):
        self._guarded = f"/{service}/"
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """The handler of a call."""
        details = handler_call_details
        if not self._may_enter(details):
            return grpc.unary_unary_rpc_method_handler(_deny)
        handler = await continuation(details)
        if handler is None or not details.method.startswith(self._guarded):
            return handler
        many = grpc.unary_stream_rpc_method_handler
        make = many if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        answer = partial(_answer, handler)
        return make(answer, response_serializer=handler.response_serializer)

    def _may_enter(self, details: Any) -> bool:
        if self._expected is None or details.method.startswith(OPEN_SERVICE):
            return True
        given = dict(details.invocation_metadata or ()).get("authorization", "")
        given = given if isinstance(given, bytes) else given.encode()
        return hmac.compare_digest(given, self._expected)


def read_token(config: ServerConfig) -> str | None:
    """The bearer token that a config gives, or that stands in its file: the text without the white
    space around it.
    """
    path = config.api_key_file
    if path is None:
        return None if config.api_key is None else _one_word(config.api_key, "api_key")
    try:
        token = Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"api_key_file={path!r} cannot be read: {error}") from error
    return _one_word(token, f"api_key_file={path!r}")


def _one_word(token: str, name: str) -> str:
    if not token.isascii() or not token.isprintable() or not token or " " in token:
        raise ValueError(f"{name} does not hold one word of ASCII")
    return token


async def _answer(handler: Any, raw: bytes, context: Any) -> Any:
    try:
        message = handler.request_deserializer(raw)
    except DecodeError:
        text = f"the request's {len(raw)} bytes are no message of this method"
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
    try:
        return await (handler.unary_stream or handler.unary_unary)(message, context)
    except EXPECTED as error:
        await context.abort(*status_of(error))


async def _deny(_: bytes, context: Any) -> None:
    text = "the call does not carry the server's token as `authorization: Bearer ...`"
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)
