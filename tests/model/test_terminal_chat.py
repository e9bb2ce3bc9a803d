"""The terminal chat with a scripted model: what is shown, what is kept, what is called."""

import io
import json
import signal
from dataclasses import replace

import pytest
from rich.console import Console

from minimax_jax.chat import Chat, ChatFormat, ChatTemplate, Tokenizer
from minimax_jax.completion import Collector, TokenLogprob
from minimax_jax.loaded import ASSETS
from minimax_jax.python_tools import PythonTools
from minimax_jax.terminal_chat import HELP, MAX_ROUNDS, TerminalChat
from tests.chat.chats import NS

TOKENIZER = Tokenizer.load(ASSETS / "tiny")
FORMAT = ChatFormat(template=ChatTemplate.load(ASSETS / "tiny"), tokenizer=TOKENIZER)


def call(**arguments):
    elements = "".join(f"{NS}<{name}>{value}{NS}</{name}>" for name, value in arguments.items())
    return f'{NS}<tool_call>\n{NS}<invoke name="half">{elements}{NS}</invoke>\n{NS}</tool_call>'


def half(number: int) -> float:
    """Half of a number."""
    if number < 0:
        raise ValueError("no negative numbers")
    return number / 2


class Script:
    """Answers in turn what it is told to, token by token; `asked` holds the messages each time."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def __call__(self, messages, tools, turns):
        self.asked.append(json.loads(json.dumps(messages)))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        prompt = FORMAT.prompt(Chat(messages=messages, tools=tools))
        collector = Collector(prompt, TOKENIZER, max_tokens=500, stop_ids=TOKENIZER.stop_ids)
        for token in [*TOKENIZER.encode(answer), *TOKENIZER.stop_ids]:
            collector.push(TokenLogprob(token_id=token, logprob=0.0))
            delta = collector.delta(0)
            if collector.finish_reason is not None:
                delta = replace(delta, completion=collector.completion(0.0, logprobs=False))
            yield delta


def chat_of(*answers, questions=(), color=False, **options):
    """The chat after the questions, its script, and what was on the screen."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=color, color_system="standard" if color else None)
    script = Script(*answers)
    chat = TerminalChat(answer=script, console=console, **options)
    lines = iter(questions)

    def read():
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    chat.run(read)
    return chat, script, screen.getvalue().removeprefix(HELP + "\n")


def test_answers_stream_after_their_thoughts_and_are_kept():
    chat, script, screen = chat_of(
        "why</mm:think>42", "</mm:think>43", questions=["What?", "  ", "And [b]that[/b]?"]
    )
    assert screen == "why\n42\n43\n"
    assert chat.messages == [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "42", "reasoning_content": "why"},
        {"role": "user", "content": "And [b]that[/b]?"},
        {"role": "assistant", "content": "43", "reasoning_content": ""},
    ]
    assert script.asked[1] == chat.messages[:3]


def test_thought_is_dim_and_the_answer_is_not():
    _, _, screen = chat_of("why</mm:think>42", questions=["What?"], color=True)
    thought, answer = screen.splitlines()[1:]
    assert answer == "42"
    assert thought.replace("\x1b[0m", "").replace("\x1b[2m", "") == "why" != thought


def test_what_the_model_writes_is_no_markup_and_no_escape():
    _, _, screen = chat_of("</mm:think>[bold]x[/bold] \x1b[31m", questions=["What?"])
    assert screen == "[bold]x[/bold] \u241b[31m\n"


def test_calls_are_run_and_their_results_go_back():
    tools = PythonTools({"half": half})
    chat, script, screen = chat_of(
        f"hm</mm:think>I halve. {call(number=3)}",
        f"</mm:think>{call(number=-1)}",
        "</mm:think>1.5",
        questions=["Half of 3?"],
        tools=tools,
    )
    roles = [message["role"] for message in chat.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    first, second = (m for m in chat.messages if m["role"] == "tool")
    assert first["content"] == "1.5"
    assert second["content"] == "error: ValueError: no negative numbers"
    assert first["tool_call_id"] == chat.messages[1]["tool_calls"][0]["id"]
    assert screen.splitlines() == [
        *("hm", "I halve. ", 'half {"number": 3}', "  1.5"),
        *('half {"number": -1}', "  error: ValueError: no negative numbers", "1.5"),
    ]
    assert [len(asked) for asked in script.asked] == [1, 3, 5]


def test_call_that_was_cut_off_is_not_run():
    cut = call(number=3).replace(f"{NS}</invoke>", "")[: -len(f"{NS}</tool_call>") - 1]
    chat, _, screen = chat_of(
        f"</mm:think>{cut}", "</mm:think>Sorry.", questions=["?"], tools=PythonTools({"half": half})
    )
    assert "cut off or malformed" in chat.messages[2]["content"] and "1.5" not in screen


def test_endless_calls_come_to_an_end():
    answers = [f"</mm:think>{call(number=2)}"] * MAX_ROUNDS
    chat, script, screen = chat_of(*answers, questions=["?"], tools=PythonTools({"half": half}))
    assert script.answers == [] and f"{MAX_ROUNDS} rounds" in screen
    assert chat.messages[-1]["role"] == "tool", "the user may go on from here"


def test_new_forgets_the_chat_and_exit_leaves():
    chat, script, _ = chat_of(
        "</mm:think>a", "</mm:think>b", questions=["1", "/new", "2", "/exit", "3"], system="S"
    )
    assert [message["content"] for message in chat.messages] == ["S", "2", "b"]
    assert script.asked[1][0] == {"role": "system", "content": "S"}


def test_unknown_command_shows_the_known_ones():
    _, script, screen = chat_of(questions=["/what"])
    assert screen == HELP + "\n" and script.asked == []


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (ValueError("prompt 0 is too long"), "prompt 0 is too long; /new"),
        (KeyboardInterrupt(), "stop"),
    ],
)
def test_what_fails_or_is_stopped_leaves_the_chat_as_it_was(failure, told):
    chat, _, screen = chat_of("</mm:think>a", failure, "</mm:think>b", questions=["1", "2", "3"])
    assert told in screen
    assert [message["content"] for message in chat.messages] == ["1", "a", "3", "b"]


def test_ctrl_c_stops_between_two_deltas():
    class Interrupted(Script):
        def __call__(self, messages, tools, turns):
            for place, delta in enumerate(super().__call__(messages, tools, turns)):
                if place == 2:
                    signal.raise_signal(signal.SIGINT)
                yield delta

    before = signal.getsignal(signal.SIGINT)
    screen = io.StringIO()
    script = Interrupted("</mm:think>one two three four")
    chat = TerminalChat(answer=script, console=Console(file=screen))
    chat.ask("count")
    assert chat.messages == [] and "stopped; the question is forgotten" in screen.getvalue()
    assert "four" not in screen.getvalue()
    assert signal.getsignal(signal.SIGINT) is before
