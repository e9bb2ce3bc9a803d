"""The process's log on standard error, as text or as one JSON object a line."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

from configs.monitoring import MonitoringConfig

TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
QUIET = ("jax", "asyncio", "httpx", "huggingface_hub")  # of them, warnings


def set_up(config: MonitoringConfig) -> None:
    """Sends every logger's lines to standard error, in the format and from the level asked for."""
    handler = _StandardError()
    handler.setFormatter(_Json() if config.log_format == "json" else logging.Formatter(TEXT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.log_level.upper())
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


class _StandardError(logging.StreamHandler):
    """Writes to what standard error is at the time: a progress bar stands below the lines then."""

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        """Set by the base class, which keeps what it was when it was made."""


class _Json(logging.Formatter):
    """time, level, logger, message; `fields` of a record's `extra` beside them."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
