"""`minimax-serve tiny` with its gateway and a key, driven by the real `anthropic` client."""

from collections.abc import Iterator

import pytest

from tests.parity.serving import ANSWER, QUESTION, THOUGHT, Serving, serving

anthropic = pytest.importorskip("anthropic")
pytestmark = pytest.mark.parity

KEY = "open-sesame"
THINKING = {"type": "adaptive"}
COLOUR = {"type": "object", "properties": {"colour": {"type": "string", "enum": ["red"]}}}
COLOUR |= {"required": ["colour"], "additionalProperties": False}
PAINT = {"name": "paint", "description": "Paints.", "input_schema": COLOUR}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Serving]:
    log = tmp_path_factory.mktemp("serve") / "log"
    with serving(log, "--api-key", KEY, "--served-model-name", "small", "claude-small") as it:
        yield it


@pytest.fixture(scope="module")
def client(server) -> Iterator:
    with anthropic.Anthropic(base_url=server.url, auth_token=KEY, max_retries=0) as it:
        yield it


def asked(**options):
    greedy = {"temperature": 0.0}  # which the client no longer has as an argument
    given = {"model": "small", "max_tokens": 100, "messages": QUESTION, "extra_body": greedy}
    return given | options


def test_a_message_is_thought_and_text(client):
    answer = client.messages.create(**asked(thinking=THINKING))
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking == THOUGHT and answer.content[1].text == ANSWER
    assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", 24)


def test_a_streamed_message_is_the_same(client):
    with client.messages.stream(**asked(thinking=THINKING)) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == ANSWER
    assert [block.type for block in final.content] == ["thinking", "text"]


def test_a_tool_is_called(client):
    """By a model that was never trained to call any, and so goes on calling for some time."""
    for _ in range(6):
        answer = client.messages.create(
            **asked(tools=[PAINT], tool_choice={"type": "any"}, thinking=THINKING, max_tokens=600)
            | {"extra_body": {"temperature": 1.0}}
        )
        if answer.stop_reason == "tool_use":
            break
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert calls and answer.stop_reason == "tool_use"
    assert {(call.name, call.input["colour"]) for call in calls} == {("paint", "red")}


def test_tokens_of_a_prompt_are_counted(client):
    assert client.messages.count_tokens(model="small", messages=QUESTION).input_tokens == 20


def test_another_name_is_an_alias(client):
    answer = client.messages.create(**asked(model="claude-small", thinking=THINKING))
    assert answer.content[-1].text == ANSWER


@pytest.mark.parametrize("key", [{"auth_token": "wrong"}, {"api_key": "wrong"}])
def test_no_key_no_answer(server, key):
    with (
        anthropic.Anthropic(base_url=server.url, max_retries=0, **key) as it,
        pytest.raises(anthropic.AuthenticationError),
    ):
        it.messages.create(**asked())


def test_a_thought_is_told_apart_only_where_it_was_asked_for(client):
    """A gap of the gateway that the README lists; one that is gone fails."""
    [block] = client.messages.create(**asked()).content
    assert block.text == f"{THOUGHT}</mm:think>{ANSWER}"
