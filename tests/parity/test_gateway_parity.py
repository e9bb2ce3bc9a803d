"""Our parser against the gateway's own `minimax_m3` parsers, on the same texts, whole and streamed.

Where they differ on purpose the reason is named here and explained in minimax_jax/chat/README.md; a
difference that is gone fails, so that the list stays true.
"""

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings

from minimax_jax.chat.parser import parse_reply
from tests.chat.generated import conversations
from tests.chat.replies import NS, block, call, spelled, tool
from tests.parity.gateway import Gateway

pytestmark = pytest.mark.parity

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
STRINGS, INTEGERS = ({"type": "array", "items": item} for item in (STRING, INTEGER))
TOOLS = [
    tool(
        "f",
        city=STRING,
        days=INTEGER,
        ratio={"type": "number"},
        flag={"type": "boolean"},
        maybe={"anyOf": [STRING, {"type": "null"}]},
        either={"type": ["string", "integer"]},
        tags=STRINGS,
        numbers=INTEGERS,
        filter={"type": "object", "properties": {"tags": STRINGS, "n": INTEGER}},
        any={},
        free={"type": "object"},
    ),
    tool("g"),
]
G = block(call("g"))
ALIKE = {
    "no marker": "Hello",
    "thought": "<mm:think>a</mm:think>b",
    "bare closer": "</mm:think>Hello",
    "closer without an opener": "x<mm:think>a</mm:think>b</mm:think>c",
    "white space": "<mm:think> a \n</mm:think>\n b ",
    "later opener": "<mm:think>a</mm:think>b<mm:think>c</mm:think>d",
    "text before the thought": "x<mm:think>a</mm:think>b",
    "cut thought": "<mm:think>cut",
    "cut closer": "<mm:think>a</mm:thi",
    "call": block(call("f", "~<city>Paris~</city>~<days>3~</days>")),
    "no arguments": G,
    "text before the call": f"Hi {G}",
    "two calls": block(call("f", "~<city>a~</city>"), call("g")),
    "layout": block(call("f", "\n~<city>a~</city>\n ~<days> 3 ~</days>\n")),
    "indentation": block(call("f", "~<city>    if x:\n\treturn 1\n~</city>")),
    "brackets in a string": block(call("f", '~<city>a</city>b <x> "q" \'~</city>')),
    "unicode": block(call("f", "~<city>\u00e9\u4e2d\U0001f600\u00a0~</city>")),
    "single quotes": spelled("~<tool_call>~<invoke name='f'>~</invoke>~</tool_call>"),
    "bare name": spelled("~<tool_call>~<invoke name=f>~</invoke>~</tool_call>"),
    "numbers": block(call("f", "~<days>3.0~</days>~<ratio>1.50~</ratio>")),
    "no number": block(call("f", "~<days>x~</days>")),
    "booleans": block(call("f", "~<flag>True~</flag>")),
    "null": block(call("f", "~<maybe>null~</maybe>")),
    "union": block(call("f", "~<either>5~</either>")),
    "list": block(call("f", "~<tags>~<item>a~</item>~</tags>")),
    "list of other names": block(call("f", "~<numbers>~<a>1~</a>~<b>2~</b>~</numbers>")),
    "empty list": block(call("f", "~<tags>~</tags>")),
    "list as JSON": block(call("f", '~<tags>["a", "b"]~</tags>')),
    "list in a row": block(call("f", "~<tags>a~</tags>~<tags>b~</tags>")),
    "object": block(call("f", "~<filter>~<tags>~<item>a~</item>~</tags>~<n>3~</n>~</filter>")),
    "empty object": block(call("f", "~<free>~</free>")),
    "literals": block(call("f", "~<any>true~</any>")),
    "cut header": spelled("~<tool_call>\n~<invoke na"),
    "opener alone": spelled("Hi ~<tool_call>"),
    "older wrapper": "<tool_calls>[...]</tool_calls>",
    "no wrapper": spelled('~<invoke name="g">~</invoke>'),
    "opener in prose": spelled("The ~<tool_call> marker"),
    "stray namespace": spelled("a ~ b"),
}
DIFFERENT = {
    "repeated markers": [
        "\n</mm:think>Hello",
        "<mm:think><mm:think>a</mm:think>b",
    ],
    "text after a call": [f"Hi {G} bye", f"{G}\n{G}", f"{G}mid{G}"],
    "call in a thought": [f"<mm:think>plan{G}", f"<mm:think>plan{G}</mm:think>ok"],
    "entities": [block(call("f", "~<city>a &lt; b~</city>"))],
    "yes and no": [block(call("f", "~<flag>yes~</flag>"))],
    "numbers without a type": [
        block(call("f", "~<any>5~</any>")),
        block(call("f", "~<free>~<a>1~</a>~</free>")),
        block(call("f", "~<undeclared>5~</undeclared>")),
        block(call("unknown", "~<a>1~</a>")),
    ],
    "lists without a type": [block(call("f", "~<any>~<item>a~</item>~<item>b~</item>~</any>"))],
    "tags in a string": [block(call("f", "~<city>a~<b>x~</b>~</city>"))],
    "namespace in a string": [block(call("f", "~<city>a ~ b~</city>"))],
    "unusual keys": [
        block(call("f", "~<invoke>a~</invoke>")),
        block(call("f", "~<filter>~<>a~</>~</filter>")),
    ],
    "large integers": [block(call("f", f"~<days>{2**70 + 1}~</days>"))],
    "a string twice": [block(call("f", "~<city>a~</city>~<city>b~</city>"))],
    "spaced namespace": [spelled('~ <tool_call>~ <invoke name="g">~ </invoke>~ </tool_call>')],
    "broken calls": [
        block(call("f", "so ~<city>a~</city>")),
        block(spelled('~<invoke nam="a">~<x>1~</x>~</invoke>'), call("g")),
        block(spelled('~<invoke name="f">~<city>Paris~</invoke>'), call("g")),
        block(call("f", "~<city>Paris~</town>~<days>3~</days>")),
    ],
    "cut calls": [
        spelled('~<tool_call>\n~<invoke name="f">~<city>Par'),
        spelled('~<tool_call>\n~<invoke name="f">~<city>Paris~</city>'),
        spelled('~<tool_call>\n~<invoke name="f">~<city>Paris~</ci'),
        spelled('~<tool_call>\n~<invoke name="g">~</invoke>'),
    ],
}
BEYOND_THE_GATEWAY = re.compile(rf"&|{re.escape(NS)}(?!<)|{re.escape(NS)}<(?:invoke)?>")
Outcome = tuple[str | None, str | None, list[tuple[str, Any]]]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    running = Gateway(tmp_path_factory.mktemp("gateway") / "log.txt")
    yield running
    running.close()


@pytest.mark.parametrize("mode", ["adaptive", "enabled"])
@pytest.mark.parametrize("text", ALIKE.values(), ids=ALIKE.keys())
def test_both_parsers_agree(gateway, text, mode):
    text = as_answered(text, mode)
    assert whole(gateway, text, mode) == ours(text, mode)
    assert streamed(gateway, text, mode) == ours(text, mode)


@pytest.mark.parametrize(
    "text", [pytest.param(text, id=why) for why, texts in DIFFERENT.items() for text in texts]
)
def test_the_list_of_differences_is_true(gateway, text):
    expected = ours(text, "adaptive")
    theirs = whole(gateway, text, "adaptive"), streamed(gateway, text, "adaptive")
    assert theirs != (expected, expected)


@settings(
    max_examples=300,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(conversations())
def test_generated_replies_stream_alike(gateway, conversation):
    """What a template writes, but for entities, unusual keys and namespaces in strings."""
    assume(not BEYOND_THE_GATEWAY.search(conversation.text))
    mode = "enabled" if conversation.prompt.endswith("<mm:think>") else "adaptive"
    reasoning, content, calls = streamed(gateway, conversation.text, mode, conversation.tools)
    assert (reasoning, content) == (conversation.reasoning or None, conversation.content)
    assert rounded(calls) == rounded(conversation.calls)


def rounded(value: Any) -> Any:
    """With 12 digits of each float and of large integers: the gateway's reader of numbers is off
    by one in the last, and makes floats of integers beyond 64 bits.
    """
    if isinstance(value, dict):
        return {name: rounded(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    is_large = isinstance(value, int) and abs(value) >= 2**63
    return float(f"{value:.12g}") if isinstance(value, float) or is_large else value


def as_answered(text: str, mode: str) -> str:
    """The text as it follows a prompt that has opened the thought."""
    if mode == "adaptive":
        return text
    return text.removeprefix("<mm:think>") if "mm:think>" in text else f"why</mm:think>{text}"


def ours(text: str, mode: str) -> Outcome:
    prompt = "]~b]ai\n" + ("<mm:think>" if mode == "enabled" else "")
    reply = parse_reply(text, prompt=prompt, tools=TOOLS)
    calls = [(one.name, json.loads(one.arguments)) for one in reply.tool_calls]
    return reply.reasoning or None, reply.content, calls


def options(mode: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
    functions = [
        one if "function" in one else {"type": "function", "function": one} for one in tools
    ]
    return {"tools": functions, "chat_template_kwargs": {"thinking_mode": mode}}


def whole(gateway: Gateway, text: str, mode: str) -> Outcome:
    message = gateway.ask(text, **options(mode, TOOLS))
    calls = [entry["function"] for entry in message.get("tool_calls") or []]
    return (
        message.get("reasoning_content") or None,
        message["content"] or None,
        [(one["name"], json.loads(one["arguments"])) for one in calls],
    )


def streamed(gateway: Gateway, text: str, mode: str, tools: Any = TOOLS) -> Outcome:
    """The deltas, merged by field and index."""
    merged = {"reasoning_content": "", "content": ""}
    calls: dict[int, list[str]] = {}
    for delta in gateway.stream(text, **options(mode, tools)):
        for field in merged:
            merged[field] += delta.get(field) or ""
        for entry in delta.get("tool_calls") or []:
            parts = calls.setdefault(entry["index"], ["", ""])
            parts[0] += entry["function"].get("name") or ""
            parts[1] += entry["function"].get("arguments") or ""
    named = [(name, json.loads(arguments)) for _, (name, arguments) in sorted(calls.items())]
    return merged["reasoning_content"] or None, merged["content"] or None, named
