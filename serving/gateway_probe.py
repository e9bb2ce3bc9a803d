"""Whether the gateway answers yet, and for which names."""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

TIMEOUT_S = 2.0
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # what to ask where it listens everywhere


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Asks a gateway on this machine."""

    host: str
    port: int
    with_tls: bool = False
    token: str | None = None

    @property
    def url(self) -> str:
        """Of its root, without a slash."""
        host = ANYWHERE.get(self.host, self.host)
        host = f"[{host}]" if ":" in host else host
        return f"http{'s' * self.with_tls}://{host}:{self.port}"

    def knows(self, names: Sequence[str]) -> bool:
        """Whether it lists all the models and encodes texts for them; blocks a few seconds."""
        listed = self._ask("/v1/models")
        found = {one.get("id") for one in (listed or {}).get("data", [])}
        if not set(names) <= found:
            return False
        return all(self._ask("/v1/tokenize", {"model": n, "prompt": "a"}) for n in names)

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """The answer, or None where there is none yet."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        if self.token is not None:
            headers["authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=_trusting()) as answer:
                return json.load(answer)
        except (OSError, HTTPException, ValueError):
            return None


def _trusting() -> ssl.SSLContext:
    """Takes any certificate: the question is only whether our own child answers."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
