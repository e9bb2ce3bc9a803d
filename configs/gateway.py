"""The HTTP gateway in front of the gRPC listeners."""

from dataclasses import dataclass

from configs.cli import described
from configs.parts import check

HTTP_PORT = 8000


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Where OpenAI's and Anthropic's clients are answered, and how replies are read for them. Host,
    key and certificates are those of the listeners (`ServerConfig`).
    """

    http: int | None = described(HTTP_PORT, "the port of HTTP; 0 takes a free one")
    reasoning_parser: str = described("minimax_m3", "what tells thoughts from content")
    tool_call_parser: str = described("minimax_m3", "what reads tool calls")
    chat_template: str | None = described(None, "a file in place of the checkpoint's own template")

    def __post_init__(self) -> None:
        ok = self.http is None or 0 <= self.http < 1 << 16
        check(ok, f"http={self.http} is not in 0..65535")
