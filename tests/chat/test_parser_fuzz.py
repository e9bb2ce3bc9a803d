"""Kept texts with the replies that they must parse to, and new random ones in each run."""

import json
import random
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from minimax_jax.chat import dialects, parser
from minimax_jax.chat.events import fold
from tests.chat import fuzz
from tests.chat.replies import parsed

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.json"))
NEW_TEXTS = 20_000


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_a_kept_text_parses_as_recorded(path):
    case = json.loads(path.read_text("utf-8"))
    dialect = getattr(dialects, case["dialect"])
    reply = parsed(case["text"], prompt=case["prompt"], tools=case["tools"], dialect=dialect)
    expected = case["reply"]
    assert (reply.reasoning, reply.content) == (expected["reasoning"], expected["content"])
    calls = [
        {"name": one.name, "arguments": json.loads(one.arguments), "complete": one.complete}
        for one in reply.tool_calls
    ]
    assert json.dumps(calls) == json.dumps(expected["tool_calls"])


def test_random_texts_lose_no_character_and_raise_nothing():
    """In a process of its own, where no types are checked, which takes ten times as long."""
    command = [sys.executable, "-m", "tests.chat.fuzz", "--texts", str(NEW_TEXTS)]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout)  # the seed
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("method", ["reasoning", "content", "leaf", "markup"])
def test_the_account_notices_what_is_lost(method):
    """Each booking is dropped in turn, and once in 300 texts that must show."""
    source = random.Random(0)
    with (
        mock.patch.object(fuzz.Ledger, method, lambda ledger, text: None),
        pytest.raises(AssertionError),
    ):
        for _ in range(300):
            fuzz.check(source)


def test_the_account_notices_text_booked_as_markup():
    text, options = "Hello", {"tools": [fuzz.STRINGS]}
    with mock.patch.object(parser, "Output", fuzz.Ledger):
        reader = parser.ReplyParser(**options)
    reply = fold([*reader.feed(text), *reader.finish()])
    reader._output.booked = [("markup", text)]
    with pytest.raises(AssertionError):
        fuzz.account(text, reply, reader._output, dialects.M3, strings=True)
