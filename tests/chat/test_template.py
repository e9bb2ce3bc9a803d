"""The bundled template against a few plain lines of Python, and the sandbox around any template."""

import itertools
import json

import pytest

from minimax_jax.chat import ChatTemplate, read_messages
from tests.chat.folders import TINY

NS = "]<]minimax[>["
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "été"}}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1, "to": {"x": ["p", true]}, "no": null}'},
}


@pytest.fixture(scope="module")
def template():
    return ChatTemplate.load(TINY)


def plain_render(messages, mode="enabled"):
    """The bundled template in other words, for conversations without tools."""
    names = {"system": "developer", "developer": "developer", "root": "system", "user": "user"}
    text = "]~!b["
    for index, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "tool":
            content = f"<response>{content}</response>"
            after_tool = messages[index - 1]["role"] == "tool"
            text = text[: -len("[e~[\n")] + "\n" if after_tool else text + "]~b]tool\n"
        elif role == "assistant":
            thought = message.get("reasoning_content")
            opened = "" if thought is None else f"<mm:think>{thought}"
            text, content = text + "]~b]ai\n", f"{opened}</mm:think>{content}"
        else:
            text += f"]~b]{names[role]}\n"
        text += f"{content}[e~[\n"
    return text + "]~b]ai\n" + {"enabled": "<mm:think>", "disabled": "</mm:think>"}.get(mode, "")


def conversations():
    """With and without: root, system, past thought, tool results (one and two)."""
    for root, system, thought, results in itertools.product(
        (0, 1), (0, 1), (None, "so"), (0, 1, 2)
    ):
        yield [
            *[{"role": "root", "content": "R"}] * root,
            *[{"role": "system", "content": "S\nT"}] * system,
            {"role": "user", "content": "2+3=?"},
            {"role": "assistant", "content": "5", "reasoning_content": thought},
            *[{"role": "tool", "content": f"r{index}"} for index in range(results)],
            {"role": "user", "content": "<b>&'é\"</b>"},
        ]


@pytest.mark.parametrize("mode", ["enabled", "disabled", "adaptive"])
def test_bundled_template_agrees_with_a_plain_renderer(template, mode):
    for messages in conversations():
        assert template.render(messages, thinking_mode=mode) == plain_render(messages, mode)


def test_thinking_is_the_default(template):
    assert template.render(HI) == plain_render(HI, "enabled")


def test_enable_thinking_is_an_alias_that_an_explicit_mode_overrides(template):
    assert template.render(HI, enable_thinking=False) == plain_render(HI, "disabled")
    assert template.render(HI, enable_thinking=True) == plain_render(HI, "enabled")
    both = template.render(HI, enable_thinking=True, thinking_mode="adaptive")
    assert both == plain_render(HI, "adaptive")


def test_effort_is_told_in_the_first_turn_and_only_where_it_was_asked(template):
    told = "<thinking_instructions>\neffort: high\n</thinking_instructions>[e~[\n"
    plain = plain_render(HI).removeprefix("]~!b[")
    assert template.render(HI, reasoning_effort="high") == f"]~!b[]~b]system\n{told}{plain}"
    root = [{"role": "root", "content": "R"}, *HI]
    rendered = template.render(root, reasoning_effort="high")
    assert rendered == f"]~!b[]~b]system\nR\n\n{told}{plain}"
    assert template.render(HI, reasoning_effort="none") == plain_render(HI, "disabled")


def test_argument_that_is_nothing_is_left_out_and_an_empty_one_is_not(template):
    function = {"name": "f", "arguments": {"no": None, "list": [], "object": {}, "text": ""}}
    turn = {"role": "assistant", "tool_calls": [{"function": function}]}
    empty = "".join(f"{NS}<{name}>{NS}</{name}>" for name in ("list", "object", "text"))
    assert f'<invoke name="f">{empty}{NS}</invoke>' in template.render([turn])


def test_document_start_is_written_once(template):
    for messages in conversations():
        assert template.render(messages).count("]~!b[") == 1


def test_past_thought_renders_alike_under_each_of_its_names(template):
    def render(**turn):
        return template.render([*HI, {"role": "assistant", **turn}, *HI])

    expected = render(content="c", reasoning_content="R")
    assert "]~b]ai\n<mm:think>R</mm:think>c[e~[" in expected
    assert render(content="c", reasoning="R") == expected
    assert render(content="<mm:think>R</mm:think>c") == expected


def test_answered_turn_extends_the_prompt_and_the_generated_text(template):
    prompt = template.render(HI)
    answer = {"role": "assistant", "reasoning": "why", "content": "42"}
    assert template.render([*HI, answer, *HI]).startswith(prompt + "why</mm:think>42[e~[")


def test_empty_thought_is_kept_so_that_the_prefix_survives(template):
    prompt = template.render(HI)
    answer = {"role": "assistant", "reasoning": "", "content": "42"}
    assert template.render([*HI, answer, *HI]).startswith(prompt + "</mm:think>42[e~[")


def test_text_parts_are_joined(template):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert template.render([{"role": "user", "content": parts}]) == template.render(HI)


def test_tool_call_is_written_in_the_syntax_of_m3(template):
    turn = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    expected = (
        f'{NS}<tool_call>\n{NS}<invoke name="add">{NS}<a>1{NS}</a>{NS}<to>{NS}<x>{NS}<item>p'
        f"{NS}</item>{NS}<item>true{NS}</item>{NS}</x>{NS}</to>{NS}</invoke>\n{NS}</tool_call>"
    )
    rendered = template.render([*HI, turn], add_generation_prompt=False)
    assert rendered.endswith(f"]~b]ai\n</mm:think>{expected}[e~[\n")


def test_tools_are_listed_in_the_developer_turn(template):
    listed = f"<tool>{json.dumps(TOOL['function'], ensure_ascii=False)}</tool>"
    alone = template.render(HI, tools=[TOOL])
    assert alone.startswith("]~!b[]~b]developer\n# Tools\n<tools>\n" + listed)
    with_system = template.render([{"role": "system", "content": "S"}, *HI], tools=[TOOL])
    assert with_system.startswith("]~!b[]~b]developer\nS\n\n# Tools\n<tools>\n" + listed)
    assert with_system.count("]~b]developer") == 1


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ("hi", "must be a list of messages, not a str"),
        ({"role": "user"}, "must be a list of messages, not a dict"),
        ([], "at least one message"),
        (["hi"], "message 0 must be an object"),
        ([{"content": "hi"}], "message 0 has no role"),
        ([*HI, {"role": "user"}], r"message 1 \(user\) has no content"),
        ([{"role": "robot", "content": "hi"}], "unknown role 'robot'"),
        ([{"role": "user", "content": 3}], "content of type int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "part 'image_url': only text"),
        ([{"role": "assistant", "content": "a", "reasoning": 3}], "reasoning that is not a string"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "must name its function"),
        ([{"role": "assistant", "tool_calls": "f"}], "tool_calls that are not a list"),
        ([*HI, {"role": "root", "content": "R"}], "root message must be the first"),
        ([{"role": "user", "content": "a", "extra": object()}], "must be plain JSON data"),
    ],
)
def test_malformed_messages_are_refused_in_one_sentence(template, messages, sentence):
    with pytest.raises(ValueError, match=sentence) as refusal:
        template.render(messages)
    assert "\n" not in str(refusal.value)


def test_arguments_that_are_no_json_are_refused(template):
    for arguments in ("{", "[1]"):
        call = {"function": {"name": "f", "arguments": arguments}}
        with pytest.raises(ValueError, match="arguments of tool call f are not"):
            template.render([{"role": "assistant", "tool_calls": [call]}])


def test_unknown_thinking_mode_is_refused(template):
    with pytest.raises(ValueError, match="thinking_mode must be enabled, disabled or adaptive"):
        template.render(HI, thinking_mode="sometimes")


def test_chat_given_as_wrong_json_is_refused():
    assert read_messages('[{"role": "user", "content": "hi"}]') == HI
    with pytest.raises(ValueError, match="not valid JSON"):
        read_messages('[{"role": "user"')


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{% set n = namespace(__init__=1) %}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_sandbox_refuses_attribute_tricks(attack):
    try:
        rendered = ChatTemplate(attack).render(HI)
    except ValueError:
        return
    # The sandbox renders an unsafe attribute as undefined, that is as nothing.
    assert "class" not in rendered and "os" not in rendered


def test_template_gets_the_helpers_of_hugging_face():
    source = (
        "{% generation %}{{ bos_token }}{% endgeneration %}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{{ {'b': '<é>', 'a': 1} | tojson }}{{ strftime_now('%Y') | length }}"
    )
    assert ChatTemplate(source, {"bos_token": "B"}).render(HI) == 'B01{"b": "<é>", "a": 1}4'


def test_folder_without_a_template_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no chat template"):
        ChatTemplate.load(tmp_path)


def test_template_that_does_not_compile_is_refused():
    with pytest.raises(ValueError, match="does not compile"):
        ChatTemplate("{% if %}")
