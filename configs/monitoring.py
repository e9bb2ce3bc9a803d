"""What a server tells of itself while it runs."""

from dataclasses import dataclass
from typing import Literal

from configs.cli import described
from configs.parts import check


@dataclass(frozen=True, kw_only=True)
class MonitoringConfig:
    """Metrics and logs. vLLM's metrics come with its HTTP; ours have a port of their own, since the
    gateway's HTTP is not ours.
    """

    metrics_port: int | None = described(8001, "the port of /metrics; 0: a free one; none: no port")
    log_format: Literal["text", "json"] = described("text", "of the lines on standard error")
    log_level: Literal["debug", "info", "warning", "error"] = described("info", "what is logged")
    disable_log_stats: bool = described(False, "leaves out the line of statistics every 10 s")
    enable_log_requests: bool = described(False, "logs each request's end with its numbers")

    def __post_init__(self) -> None:
        port = self.metrics_port
        check(port is None or 0 <= port < 1 << 16, f"metrics_port={port} is not in 0..65535")
