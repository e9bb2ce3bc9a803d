"""The command as a user types it: output, JSON, and one sentence with a non-zero exit for a
mistake.
"""

import io
import json
import shutil

import pytest

from minimax_jax.__main__ import main
from minimax_jax.checkpoint import save_model
from minimax_jax.loaded import ASSETS
from tests.model.models import random_model, small

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A complete random checkpoint in the M3.1 format."""
    path = tmp_path_factory.mktemp("models") / "random"
    save_model(random_model(small(2, num_tokens=501)), path, format="m3.1")
    for name in (*TEXT_FILES, "chat_template.jinja"):
        shutil.copy(ASSETS / "tiny" / name, path / name)
    return str(path)


def run(capsys, *arguments: str) -> str:
    main(arguments)
    return capsys.readouterr().out


def fails(capsys, *arguments: str) -> str:
    """The one sentence on stderr of a command that must fail with nothing on stdout."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out, err = capsys.readouterr()
    assert stop.value.code not in (0, None) and out == ""
    return err.strip().splitlines()[-1]


def test_json_has_text_reasoning_ids_usage_and_time(capsys, folder):
    arguments = ("generate", "--model", folder, "--chat", "What is 1+1?", "--max-tokens", "5")
    (line,) = run(capsys, *arguments, "--json").splitlines()
    record = json.loads(line)
    assert record["finish_reason"] in ("stop", "length")
    assert len(record["token_ids"]) == record["usage"]["completion_tokens"] <= 5
    total = record["usage"]["prompt_tokens"] + record["usage"]["completion_tokens"]
    assert record["usage"]["total_tokens"] == total
    assert set(record) == {
        *("text", "reasoning", "token_ids", "finish_reason", "usage", "seconds"),
    }


def test_thought_and_answer_are_printed_apart(capsys, folder):
    chat = json.dumps([{"role": "user", "content": "What is 1+1?"}])
    out = run(capsys, "generate", "--model", folder, "--chat", chat, "--max-tokens", "5")
    assert "thought" in out and "answer" in out


def test_of_a_long_question_the_beginning_and_the_end_are_shown(capsys, folder):
    lines = [f"line {i}" for i in range(10)]
    out = run(
        capsys, "generate", "--model", folder, "--prompt", "\n".join(lines), "--max-tokens", "2"
    )
    assert out.splitlines()[:6] == [*lines[:4], "(5 more lines)", "line 9"]


def test_prompts_and_chats_keep_their_order(capsys, folder):
    arguments = ("--prompt", "12", "--prompt", "7 * 8", "--chat", "9?", "--max-tokens", "2")
    out = run(capsys, "generate", "--model", folder, *arguments)
    assert out.index("12") < out.index("7 * 8") < out.index("9?")


def test_chat_options_reach_the_template(capsys, folder, tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "f", "input_schema": {"type": "object"}}]')
    generate = ("generate", "--model", folder, "--chat", "9?", "--max-tokens", "1", "--json")

    def prompt_tokens(*options: str) -> int:
        return json.loads(run(capsys, *generate, *options))["usage"]["prompt_tokens"]

    plain = prompt_tokens()
    assert prompt_tokens("--thinking-mode", "adaptive") == plain - 1
    assert prompt_tokens("--reasoning-effort", "low") > plain
    assert prompt_tokens("--tools", str(tools)) > plain


def test_chat_answers_what_stdin_asks(capsys, folder, tmp_path, monkeypatch):
    tools = tmp_path / "tools.py"
    tools.write_text("def f(x: int) -> int:\n    return x")
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1?\n/new\n2+2?\n"))
    options = ("--max-tokens", "3", "--tools", str(tools), "--system", "S")
    out = run(capsys, "chat", "--model", folder, *options)
    assert out.index("/new begins") < out.index("> 1+1?") < out.index("> 2+2?")
    assert out.count("(length)") == 2


def test_inspect_prints_what_is_there(capsys, folder):
    out = run(capsys, "inspect", folder)
    assert "nvfp4" in out and "2 layers" in out


def test_convert_writes_what_inspect_reads(capsys, folder, tmp_path):
    run(capsys, "convert", folder, str(tmp_path / "out"), "--format", "bf16", "--layers", "1")
    assert "1 layers" in run(capsys, "inspect", str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "--model", "nosuch", "--prompt", "x"], "'nosuch' is neither a bundled model"),
        (["generate", "--model", "FOLDER"], "nothing to answer"),
        (["generate", "--model", "FOLDER", "--prompt", ""], "prompt 0 is empty"),
        (["generate", "--model", "FOLDER", "--chat", "[{"], "not valid JSON"),
        (["generate", "--model", "FOLDER", "--chat", '[{"role": "x"}]'], "unknown role"),
        (["generate", "--model", "FOLDER", "--prompt", "x", "--temperature", "-1"], "temperature="),
        (["generate", "--model", "FOLDER", "--prompt", "1 " * 3000], "more than the context"),
        (["generate", "--model", "FOLDER", "--prompt", "x", "--kv", "int3"], "invalid choice"),
        (["generate", "--model", "FOLDER", "--prompt", "x", "--no-such"], "unrecognized arguments"),
        (["generate", "--model", "FOLDER", "--chat", "x", "--tools", "none.json"], "none.json"),
        (["generate", "--model", "FOLDER", "--chat", "x", "--reasoning-effort", "9"], "invalid ch"),
        (["chat", "--model", "FOLDER", "--tools", "none.py"], "none.py is not a Python file"),
        (["inspect", "nosuch"], "'nosuch' is neither"),
        (["convert", "FOLDER", "FOLDER", "--format", "bf16"], "not an empty folder"),
        (["convert", "FOLDER", "elsewhere", "--format", "bf16", "--layers", "7"], "7"),
    ],
)
def test_a_mistake_is_one_sentence(capsys, folder, arguments, sentence):
    arguments = [folder if one == "FOLDER" else one for one in arguments]
    assert sentence in fails(capsys, *arguments)


def test_a_damaged_file_is_named(capsys, folder, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    with (damaged / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 1024)
    line = fails(capsys, "generate", "--model", str(damaged), "--prompt", "x")
    assert "model.safetensors" in line
