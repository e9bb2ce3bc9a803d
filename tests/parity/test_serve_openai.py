"""`minimax-serve tiny` with its gateway, driven by the real `openai` client."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.parity.serving import ANSWER, QUESTION, THOUGHT, Serving, serving

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.parity

MODEL, LIMIT = "tiny", 8
COLOUR = {"type": "object", "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}}}
COLOUR |= {"required": ["colour"], "additionalProperties": False}
PAINT = {"type": "function", "function": {"name": "paint", "parameters": COLOUR}}
OPEN = [{"role": "user", "content": "Tell me of Leo and 305 eggs."}]  # which it was never taught
LONG = {"max_tokens": 900, "extra_body": {"ignore_eos": True}, "temperature": 1.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Serving]:
    log = tmp_path_factory.mktemp("serve") / "log"
    with serving(log, "--max-concurrent-requests", str(LIMIT)) as it:
        yield it


@pytest.fixture(scope="module")
def client(server) -> Iterator:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as it:
        yield it


@pytest.fixture(autouse=True)
def nothing_is_left(server):
    yield
    server.wait_until_free()


def chat(client, **options):
    given = {"model": MODEL, "messages": QUESTION, "temperature": 0.0, "max_tokens": 100}
    return client.chat.completions.create(**(given | options))


def test_the_model_is_listed(client):
    assert [one.id for one in client.models.list()] == [MODEL]


def test_a_chat_is_thought_and_answer_with_their_tokens_counted(client):
    answer = chat(client)
    message, usage = answer.choices[0].message, answer.usage
    assert (message.content, message.reasoning_content) == (ANSWER, THOUGHT)
    assert answer.choices[0].finish_reason == "stop"
    assert (usage.prompt_tokens, usage.completion_tokens) == (20, 24)
    assert usage.completion_tokens_details.reasoning_tokens == 20


def test_a_streamed_chat_is_the_same(client):
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == THOUGHT
    assert sum(map(bool, thoughts)) > 1  # a neutral name: nothing is merged
    assert chunks[-1].usage.completion_tokens == 24


def test_a_completion_whole_and_streamed(client):
    ask = client.completions.create
    given = {"model": MODEL, "prompt": "12 + ", "max_tokens": 12, "temperature": 0.0}
    whole = ask(**given).choices[0].text
    pieces = [p.choices[0].text for p in ask(**given, stream=True) if p.choices]
    assert whole and "".join(pieces) == whole


def test_tools_may_be_called(client):
    answer = chat(client, tools=[PAINT], max_tokens=60)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert answer.choices[0].message.content or answer.choices[0].message.reasoning_content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "paint"}}]
)
def test_a_required_tool_is_called_with_valid_arguments(client, choice, stream):
    """F139, F137: by a model that was never trained to call any, and so goes on calling for some
    time; id and name of each call come once.
    """
    how = {"tools": [PAINT], "tool_choice": choice, "temperature": 1.5, "max_tokens": 400}
    for seed in range(2, 8):
        given = chat(client, stream=stream, seed=seed, **how)
        reason, calls = streamed_calls(given) if stream else whole_calls(given)
        if reason == "tool_calls":
            break
    assert reason == "tool_calls" and calls
    for name, arguments in calls:
        assert name == "paint" and json.loads(arguments)["colour"] in ("red", "blue")


def whole_calls(answer) -> tuple[str, list[tuple[str, str]]]:
    [choice] = answer.choices
    calls = choice.message.tool_calls or []
    return choice.finish_reason, [(one.function.name, one.function.arguments) for one in calls]


def streamed_calls(chunks) -> tuple[str, list[tuple[str, str]]]:
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    parts = [part for choice in choices for part in choice.delta.tool_calls or []]
    calls = []
    for index in sorted({part.index for part in parts}):
        own = [part for part in parts if part.index == index]
        assert len([part.id for part in own if part.id]) == 1
        [name] = [part.function.name for part in own if part.function.name]
        calls.append((name, "".join(part.function.arguments or "" for part in own)))
    return choices[-1].finish_reason, calls


def test_an_answer_keeps_to_a_schema(client):
    schema = {"type": "json_schema", "json_schema": {"name": "c", "schema": COLOUR}}
    for seed in range(3):
        answer = chat(client, response_format=schema, temperature=1.0, seed=seed, max_tokens=300)
        message = answer.choices[0].message
        if answer.choices[0].finish_reason == "stop":
            assert json.loads(message.content)["colour"] in ("red", "blue")
        else:
            assert answer.choices[0].finish_reason == "length"


def test_two_answers_come_apart(client):
    answer = chat(client, messages=OPEN, n=2, temperature=1.5, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    texts = [choice.message.reasoning_content for choice in answer.choices]
    assert all(texts) and texts[0] != texts[1]


def test_a_stop_string_ends_the_text_before_it(client):
    choice = chat(client, stop=["4+3"]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.reasoning_content.rstrip() == THOUGHT.partition("4+3")[0].rstrip()


def test_log_probabilities_come_with_the_content(client):
    choice = chat(client, logprobs=True, top_logprobs=3).choices[0]
    given = choice.logprobs.content
    assert "".join(one.token for one in given) == ANSWER
    assert all(len(one.top_logprobs) == 3 for one in given)
    assert all(one.logprob == max(t.logprob for t in one.top_logprobs) for one in given)


def test_a_seed_decides(client):
    def texts(seed):
        answer = chat(client, messages=OPEN, temperature=1.5, seed=seed)
        return answer.choices[0].message.reasoning_content

    assert texts(5) == texts(5)
    assert len({texts(seed) for seed in range(6)}) > 1


@pytest.mark.parametrize("effort", ["low", "high", "none"])
def test_a_client_that_says_how_hard_to_think_gets_an_answer(client, effort):
    message = chat(client, reasoning_effort=effort).choices[0].message
    assert message.content or message.reasoning_content
    assert effort != "none" or not message.reasoning_content


def test_an_unknown_field_is_no_reason_to_refuse(client):
    assert chat(client, extra_body={"wibble": 3}).choices[0].message.content == ANSWER


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_a_limit_ends_an_answer(client, max_tokens):
    """F135."""
    answer = chat(client, max_tokens=max_tokens)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == max_tokens


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "1024"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"n": 0}, "n"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}},
            "",
        ),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(client, options, text):
    """F133, F135."""
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, **options)
    assert text in str(error.value)


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        chat(client, model="gpt-5")


def test_a_client_that_hangs_up_frees_its_blocks(client, server):
    """F131: streamed and whole."""
    with chat(client, stream=True, **LONG) as chunks:
        next(iter(chunks))
        server.wait_until_held(1)
    server.wait_until_free()
    with pytest.raises(openai.APITimeoutError):
        chat(client.with_options(timeout=0.5), **LONG)
    server.wait_until_free()


def test_a_client_that_is_killed_frees_its_blocks(server):
    program = textwrap.dedent(
        f"""
        import openai
        client = openai.OpenAI(base_url={server.url + "/v1"!r}, api_key="none")
        stream = client.chat.completions.create(
            model={MODEL!r}, messages={QUESTION!r}, stream=True, max_tokens=900,
            extra_body={{"ignore_eos": True}})
        next(iter(stream))
        print("streaming", flush=True)
        for _ in stream: pass
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None and killed.stdout.readline() == b"streaming\n"
        killed.kill()
    server.wait_until_free()


def test_a_full_queue_is_told_as_such(client, server):
    with ThreadPoolExecutor(LIMIT) as pool:  # those that wait have no headers yet
        opened = [pool.submit(chat, client, stream=True, **LONG) for _ in range(LIMIT)]
        server.wait_until_held(LIMIT)
        assert_turned_away(client)
        for future in opened:
            future.result().close()
    server.wait_until_free()
    assert chat(client).choices[0].message.content == ANSWER


def assert_turned_away(client) -> None:
    with pytest.raises(openai.RateLimitError) as error:
        chat(client)
    assert f"at most {LIMIT} can be" in str(error.value)


def test_nothing_was_compiled_since_the_start(server):
    """F190: whatever the tests above have asked for."""
    assert server.metric("m3jax:recompiles_total") == 0
    assert server.metric("vllm:request_success_total") > 0


def test_the_gateways_gaps_are_those_that_the_readme_lists(client):
    """One that is gone fails, so that the list stays true."""
    biased = chat(client, logit_bias={"52": 100}).choices[0].message
    assert (biased.content, biased.reasoning_content) == (ANSWER, THOUGHT)
    given = client.completions.create(model=MODEL, prompt="1 + ", max_tokens=2, logprobs=1)
    assert given.choices[0].logprobs is None
