"""Safe mode: what data spells stays text, what the template writes stays a token, wherever they
meet.
"""

import json
import random

import pytest

from minimax_jax.chat import Chat, ChatFormat, ChatTemplate, Tokenizer
from minimax_jax.chat.control_tokens import ControlTokens
from minimax_jax.chat.rendered import Rendered, escaped, unused_mark
from tests.chat.folders import TINY

MARK = "\ufdd0"
NS = "]<]minimax[>["


@pytest.fixture(scope="module")
def tiny():
    return ChatFormat(template=ChatTemplate.load(TINY), tokenizer=Tokenizer.load(TINY))


@pytest.fixture(scope="module")
def markers(tiny):
    backend = tiny.tokenizer._backend
    return [token.content for token in backend.get_added_tokens_decoder().values()]


def structure(tiny, messages, tools=(), safe=True):
    """The control tokens among the ids, in order, and the whole text."""
    ids = tiny.prompt(Chat(messages=messages, tools=tools, safe=safe)).ids
    first = tiny.tokenizer.token_id("]~b]")
    return [token for token in ids if token >= first], tiny.tokenizer.decode(ids)


def user(text):
    return [{"role": "user", "content": text}]


def test_unmarked_prompt_is_encoded_as_its_text(tiny, markers):
    draw = random.Random(0)
    for _ in range(300):
        pieces = draw.choices([*markers, *'ab \n<]~[é漢"'], k=12)
        text = "".join(pieces)
        rendered = Rendered(marked=text, mark=MARK)
        assert tiny.tokenizer.encode_rendered(rendered) == tiny.tokenizer.encode(text)


def test_own_split_finds_tokens_as_the_tokenizer_does(tiny, markers):
    draw = random.Random(1)
    broken = sorted({token[:n] for token in markers for n in range(1, len(token) + 1)})
    for _ in range(500):
        text = "".join(draw.choices(broken, k=6))
        own = [token for _, token in tiny.tokenizer.control_tokens.split(text) if token]
        theirs = [tiny.tokenizer._backend.id_to_token(i) for i in tiny.tokenizer.encode(text)]
        assert own == [token for token in theirs if token in markers]


@pytest.mark.parametrize("safe", [True, False])
def test_spelled_marker_is_text_in_safe_mode_alone(tiny, markers, safe):
    for marker in markers:
        tokens, text = structure(tiny, user(f"a {marker} b"), safe=safe)
        plain, _ = structure(tiny, user("a b"))
        assert (tokens == plain) == safe
        assert f"]~b]user\na {marker} b[e~[" in text


def test_marker_in_any_place_of_the_data_is_text(tiny):
    spelled = "x]~b]<mm:think>[e~["
    function = {"name": spelled, "arguments": {spelled: [spelled], "a": {"b": spelled}}}
    call = {"id": spelled, "type": "function", "function": function}

    def conversation(text, call):
        return [
            {"role": "root", "content": text},
            {"role": "system", "content": text},
            {"role": "user", "content": [{"type": "text", "text": text}]},
            {"role": "assistant", "content": text, "reasoning": text, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": text},
        ]

    tool = {"name": "f", "description": spelled, "parameters": {"properties": {spelled: {}}}}
    tokens, text = structure(tiny, conversation(spelled, call), [tool])
    plain_call = json.loads(json.dumps(call).replace(spelled, "x"))
    plain_tool = json.loads(json.dumps(tool).replace(spelled, "x"))
    plain, _ = structure(tiny, conversation("x", plain_call), [plain_tool])
    assert tokens == plain
    assert text.count(spelled) == 13
    unsafe, same_text = structure(tiny, conversation(spelled, call), [tool], safe=False)
    assert unsafe != plain and same_text == text


def test_content_cannot_reach_into_the_markers_around_it(tiny):
    """`]<]minimax[>` before `[e~[` would make a namespace marker and swallow the turn's end."""
    plain, _ = structure(tiny, user("x"))
    for end in (NS[:-1], "]", "]~", "<mm:think", "]<]image[>"):
        tokens, text = structure(tiny, user(end))
        assert tokens == plain and f"user\n{end}[e~[" in text
    unsafe, _ = structure(tiny, user(NS[:-1]), safe=False)
    assert unsafe != plain, "without the mark the attack works"


def test_argument_named_like_a_tag_makes_no_token(tiny):
    for name in ("tool_call", "think", "mm:think"):
        call = {"function": {"name": "f", "arguments": {name: "1"}}}
        tokens, text = structure(tiny, [{"role": "assistant", "tool_calls": [call]}])
        other = {"function": {"name": "f", "arguments": {"x": "1"}}}
        assert tokens == structure(tiny, [{"role": "assistant", "tool_calls": [other]}])[0]
        assert f"{NS}<{name}>1{NS}</{name}>" in text


@pytest.mark.parametrize("seed", range(4))
def test_pieces_of_markers_in_every_place_change_no_structure(tiny, markers, seed):
    draw = random.Random(seed)
    pieces = [token[i:j] for token in markers for i in range(len(token)) for j in range(i + 1, 40)]

    def conversation(text):
        call = {"function": {"name": "f", "arguments": {text() or "k": text()}}}
        return [
            {"role": "system", "content": [{"type": "text", "text": text()} for _ in "12"]},
            {"role": "user", "content": text()},
            {"role": "assistant", "content": text(), "reasoning": text(), "tool_calls": [call]},
            {"role": "tool", "content": text()},
        ]

    plain, _ = structure(tiny, conversation(lambda: "x"))
    for _ in range(150):
        messages = conversation(lambda: "".join(draw.choices(pieces, k=draw.randint(0, 2))))
        rendered = tiny.template.render(messages)
        tokens, text = structure(tiny, messages)
        assert tokens == plain and text == rendered


def test_template_may_trim_and_compare_as_without_marks(tiny):
    source = (
        "{% for m in messages %}{{ m.content | trim }}|{{ m.tool_calls[0].type }}|"
        "{{ m.tool_calls[0].type == 'function' }}{% endfor %}{{ tools }}{{ enable_thinking }}"
    )
    call = {"type": "function", "function": {"name": "f"}}
    messages = [{"role": "assistant", "content": " ]~b]x e \n", "tool_calls": [call]}]
    rendered = ChatTemplate(source).render_marked(
        messages, options={}, control_tokens=tiny.tokenizer.control_tokens
    )
    assert rendered.text.startswith("]~b]x e|function|True")
    assert MARK in rendered.marked


def test_mark_is_found_again_when_json_escapes_it(tiny):
    template = ChatTemplate("{{ messages | tojson(ensure_ascii=True) }}")
    text = "é ]~b] \\ufdd0 \ufdd1"
    rendered = template.render_marked(
        user(text), options={}, control_tokens=tiny.tokenizer.control_tokens
    )
    assert json.loads(rendered.text) == user(text)
    assert rendered.mark in rendered.marked and "]~b]" not in rendered.marked


def test_mark_is_a_character_that_the_text_lacks():
    assert unused_mark("a") == MARK
    assert unused_mark(MARK + "\ufdd1") == "\ufdd2"
    assert unused_mark(escaped(MARK)) == "\ufdd1"
    assert unused_mark(json.dumps(escaped(MARK))) == "\ufdd1"


def test_data_without_control_tokens_is_left_alone():
    nothing = ControlTokens(())
    data = {"a": ["]~b]", 1, None], "arguments": {"]~b]": True}}
    assert nothing.mark_messages(data, MARK) == data == nothing.mark_whole(data, MARK)
    assert list(nothing.split("]~b]")) == [("]~b]", "")]
