"""Our own answer put back: the prompt goes on from the old prompt and the generated ids (F17)."""

import json
import random

import pytest

from minimax_jax.chat import (
    Chat,
    ChatFormat,
    ChatTemplate,
    MessageBuilder,
    ReplyParser,
    Tokenizer,
    TurnMemory,
)
from tests.chat.chats import HI, LOOK_UP, NS
from tests.chat.folders import TINY

MODES = ("enabled", "disabled", "adaptive")
WORDS = ("a", "  ", "\n", "é", "漢字", "😀", "1 + 1 = 2", "<b>", '"', "\\", "x>y", "\t", "]", "the")
TOOL = {
    "name": "edit",
    "parameters": {
        "properties": {
            "old": {"type": "string"},
            "count": {"type": "integer"},
            "ratio": {"type": "number"},
            "all": {"type": "boolean"},
            "lines": {"type": "array", "items": {"type": "string"}},
            "where": {"type": "object", "properties": {"path": {"type": "string"}}},
        }
    },
}


@pytest.fixture(scope="module")
def template():
    return ChatTemplate.load(TINY)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(TINY)


def answer(prompt, text, tools=(TOOL,)):
    """The message that a client gets for a generated text."""
    parser, builder = ReplyParser(prompt=prompt, tools=tools), MessageBuilder("r")
    builder.add(parser.feed(text))
    builder.add(parser.finish())
    return builder.message().to_dict()


def next_messages(message):
    """What a client may send after an answer: results of all its calls, or more from the user."""
    calls = message.get("tool_calls", ())
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in calls]
    return [message, *(results or [{"role": "user", "content": "more"}])]


def phrase(draw, most=6):
    return "".join(draw.choices(WORDS, k=draw.randint(0, most)))


def arguments(draw):
    values = {
        "old": phrase(draw),
        "count": draw.randint(-99, 99),
        "ratio": draw.choice((0.5, -1.25)),
        "all": draw.random() < 0.5,
        "lines": [phrase(draw) for _ in range(draw.randint(0, 3))],
        "where": {"path": phrase(draw)} if draw.random() < 0.5 else {},
    }
    kept = draw.sample(sorted(values), draw.randint(0, len(values)))
    return {name: values[name] for name in kept}


def written(draw, mode):
    """An answer in the template's own words, as the model was taught to write it."""
    thought = {
        "enabled": f"{phrase(draw)}</mm:think>",
        "disabled": "",
        "adaptive": draw.choice((f"<mm:think>{phrase(draw)}</mm:think>", "</mm:think>")),
    }
    calls = "".join(
        f'{NS}<invoke name="edit">{elements(arguments(draw))}{NS}</invoke>\n'
        for _ in range(draw.choice((0, 0, 1, 2)))
    )
    said = phrase(draw).strip()
    return thought[mode] + said + (f"{NS}<tool_call>\n{calls}{NS}</tool_call>" if calls else "")


def elements(value):
    if isinstance(value, dict):
        return "".join(f"{NS}<{k}>{elements(v)}{NS}</{k}>" for k, v in value.items())
    if isinstance(value, list):
        return "".join(f"{NS}<item>{elements(v)}{NS}</item>" for v in value)
    return value if isinstance(value, str) else json.dumps(value)


def starts_with(whole, beginning):
    return whole[: len(beginning)] == beginning


@pytest.mark.parametrize("mode", MODES)
def test_answer_in_the_templates_words_renders_back_as_it_was_generated(template, tokenizer, mode):
    """Thought, content and calls with white space, unicode, nothing: text and ids, no memory."""
    draw, chat_format = random.Random(mode), ChatFormat(template=template, tokenizer=tokenizer)
    for _ in range(150):
        text = written(draw, mode)
        chat = Chat(messages=HI, tools=[TOOL], options={"thinking_mode": mode})
        old = chat_format.prompt(chat)
        generated = [*tokenizer.encode(text), *tokenizer.stop_ids]
        following = [*HI, *next_messages(answer(old.text, text))]
        new = chat_format.prompt(Chat(messages=following, tools=[TOOL], options=chat.options))
        assert starts_with(new.text, f"{old.text}{text}[e~["), (old.text, text)
        if mode != "adaptive":  # where the template's newline may merge with the answer's first
            assert starts_with(new.ids, old.ids + generated)


def random_reply(draw, tokenizer, mode):
    """Ids that nobody would encode: words in pieces, any marker in any place, broken characters."""
    text = written(draw, mode)
    ids = []
    for piece in (text[i : i + 3] for i in range(0, len(text), 3)):
        ids += tokenizer.encode(piece)
    for _ in range(draw.choice((0, 0, 1, 5))):
        token = draw.randrange(tokenizer.num_tokens)
        if token not in tokenizer.stop_ids:
            ids.insert(draw.randint(0, len(ids)), token)
    return ids + list(tokenizer.stop_ids) * draw.choice((0, 1, 1))


@pytest.mark.parametrize("mode", MODES)
def test_remembered_conversation_goes_on_from_the_generated_ids(template, tokenizer, mode):
    """Any ids at all, over three turns; a cut answer gets the end of turn that it lacks."""
    draw = random.Random(mode)
    chat_format = ChatFormat(template=template, tokenizer=tokenizer, turns=TurnMemory())
    for case in range(50):
        messages = [{"role": "user", "content": f"Question {case}"}]
        for _ in range(3):
            chat = Chat(messages=messages, tools=[TOOL], options={"thinking_mode": mode})
            old = chat_format.prompt(chat)
            ids = random_reply(draw, tokenizer, mode)
            stopped = ids[-1:] == list(tokenizer.stop_ids)
            message = answer(old.text, tokenizer.decode(ids[:-1] if stopped else ids))
            chat_format.remember(old, ids, message)
            messages = [*messages, *next_messages(message)]
            new = chat_format.prompt(Chat(messages=messages, tools=[TOOL], options=chat.options))
            expected = old.ids + ids + list(tokenizer.stop_ids) * (not stopped)
            assert starts_with(new.ids, expected)
            rest = new.ids[len(expected) :]
            assert tokenizer.decode(rest).startswith(("\n]~b]tool\n", "\n]~b]user\n"))


def test_memory_is_used_for_exactly_the_same_history(template, tokenizer):
    """Another system prompt, answer, tool, mode or way to read markers finds nothing."""
    chat_format = ChatFormat(template=template, tokenizer=tokenizer, turns=TurnMemory())
    plain = ChatFormat(template=template, tokenizer=tokenizer)
    messages = [{"role": "system", "content": "S"}, *HI]
    old = chat_format.prompt(Chat(messages=messages, tools=[TOOL]))
    ids = [*(tokenizer.encode(c)[0] for c in "ab"), tokenizer.token_id("</mm:think>")]
    ids += [*(tokenizer.encode(c)[0] for c in "the the"), *tokenizer.stop_ids]
    message = answer(old.text, tokenizer.decode(ids[:-1]))
    chat_format.remember(old, ids, message)
    assert len(chat_format.turns) == 1

    def same(**changes):
        fields = {"messages": [*messages, message, *HI], "tools": [TOOL], **changes}
        found, rendered = (one.prompt(Chat(**fields)) for one in (chat_format, plain))
        assert found.text == rendered.text
        return found.ids == rendered.ids

    assert not same()
    assert same(safe=False)
    assert same(messages=[{"role": "system", "content": "T"}, *HI, message, *HI])
    assert same(messages=[*messages, {**message, "content": "thethe"}, *HI])
    assert same(messages=[*messages, {**message, "reasoning_content": ""}, *HI])
    assert same(tools=[LOOK_UP]) and same(tools=[])


def test_answer_that_encodes_as_it_was_generated_takes_no_memory(template, tokenizer):
    chat_format = ChatFormat(template=template, tokenizer=tokenizer, turns=TurnMemory())
    old = chat_format.prompt(Chat(messages=HI))
    ids = [*tokenizer.encode("why</mm:think>42"), *tokenizer.stop_ids]
    chat_format.remember(old, ids, answer(old.text, "why</mm:think>42"))
    assert len(chat_format.turns) == 0


def test_spelled_marker_in_an_answer_keeps_its_token(template, tokenizer):
    """The model wrote the token `<mm:think>` in its answer; safe mode alone would make it text."""
    chat_format = ChatFormat(template=template, tokenizer=tokenizer, turns=TurnMemory())
    old = chat_format.prompt(Chat(messages=HI))
    text = "so</mm:think>The tag <mm:think> opens."
    ids = [*tokenizer.encode(text), *tokenizer.stop_ids]
    message = answer(old.text, text)
    assert "<mm:think>" in message["content"]
    chat_format.remember(old, ids, message)
    new = chat_format.prompt(Chat(messages=[*HI, message, *HI]))
    assert starts_with(new.ids, old.ids + ids)
    forged = chat_format.prompt(Chat(messages=[{"role": "user", "content": "?"}, message, *HI]))
    assert forged.ids.count(tokenizer.token_id("<mm:think>")) == 2, "the turn's and the prompt's"


def test_memory_forgets_what_was_used_least_lately():
    turns = TurnMemory(max_tokens=10)
    for name in (b"a", b"b", b"c"):
        turns.store(name, [1, 2, 3])
    assert turns.recall([b"a"]) == (0, [1, 2, 3])
    turns.store(b"d", [4, 5, 6])
    assert [turns.recall([name]) is None for name in (b"a", b"b", b"c", b"d")] == [0, 1, 0, 0]
    assert turns.num_tokens == 9
    turns.store(b"a", [7])
    assert turns.recall([b"c", b"a", b"x"]) == (1, [7]) and turns.num_tokens == 7
    turns.store(b"e", range(11))
    assert turns.recall([b"e"]) is None and len(turns) == 3
    with pytest.raises(ValueError, match="max_tokens=0"):
        TurnMemory(max_tokens=0)
