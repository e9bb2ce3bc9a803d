"""Records what the real gateway asks an engine for when a tool has to be called.

`python -m tests.golden.record_structural_tags` writes structural_tags.json; needs the extra
`parity`. Each case has the request's own fields, where the engine says its grammars start, and the
structural tag that arrived.
"""

import json
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.parity.gateway import Engine, Gateway, messages

TOOLS = [
    {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "unit": {"enum": ["c", "f"]},
                "where": {
                    "type": "object",
                    "properties": {"lat": {"type": "number"}},
                    "required": ["lat"],
                },
            },
            "required": ["city"],
        },
    },
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
THOUGHT = {"chat_template_kwargs": {"thinking_mode": "enabled"}}
CASES = {
    "required": ("after_reasoning", {"tool_choice": "required"}),
    "named": ("after_reasoning", {"tool_choice": NAMED}),
    "required with an open thought": ("after_reasoning", {"tool_choice": "required", **THOUGHT}),
    "required from the first token": ("first_token", {"tool_choice": "required", **THOUGHT}),
}


class Recorder(Engine):
    """Keeps the sampling parameters of the last request."""

    def __init__(self, start: str):
        super().__init__()
        self.start = start
        self.asked: Any = None

    def GetServerInfo(self, request: Any, context: Any) -> Any:
        return messages.GetServerInfoResponse(
            server_type="vllm", constrained_decoding_start=self.start
        )

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:
        self.asked = request.sampling_params
        yield from super().Generate(request, context)


def record() -> dict[str, Any]:
    """All cases, each behind a gateway of its own."""
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    recorded = {}
    for name, (start, request) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            engine = Recorder(start)
            gateway = Gateway(Path(folder) / "log", engine)
            try:
                gateway.ask("hi", tools=tools, **request)
            finally:
                gateway.close()
        assert engine.asked.WhichOneof("constraint") == "structural_tag", name
        recorded[name] = {
            "constrained_decoding_start": start,
            "request": request,
            "grammar_from_first_token": engine.asked.grammar_from_first_token,
            "structural_tag": json.loads(engine.asked.structural_tag),
        }
    return {"gateway": f"smg {version('smg')}", "tools": TOOLS, "cases": recorded}


if __name__ == "__main__":
    text = json.dumps(record(), ensure_ascii=False)
    Path(__file__).with_name("structural_tags.json").write_text(text + "\n", "utf-8")
