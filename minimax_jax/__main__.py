"""The command `minimax-jax`: generate, chat, inspect, convert, capacity, plan, bench."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from configs.parts import CACHE_FORMATS
from configs.speculative import SpeculativeConfig
from minimax_jax.answers import print_answers
from minimax_jax.bench.command import add_bench
from minimax_jax.capacity.command import add_capacity
from minimax_jax.chat import TurnMemory, read_messages, read_tools
from minimax_jax.chat.thinking import EFFORTS, MODES, NO_EFFORT
from minimax_jax.compiled import keep_compiled_programs
from minimax_jax.completion import Delta
from minimax_jax.convert import convert
from minimax_jax.device_memory import use_all_memory
from minimax_jax.generate import Options, PromptLike, generate
from minimax_jax.inspect import inspect_checkpoint, print_inspection
from minimax_jax.loaded import LoadedModel, find, load
from minimax_jax.mesh_flags import add_mesh_flags, joined, mesh_and_rules
from minimax_jax.plan.command import add_plan
from minimax_jax.python_tools import PythonTools
from minimax_jax.sampling_flags import add_sampling_flags, sampling_options
from minimax_jax.terminal_chat import TerminalChat
from sharding.rules import SERVE, Rules


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command; a user's mistake is one sentence on standard error and exit code 2."""
    options = _parser().parse_args(arguments)
    use_all_memory(os.environ)
    keep_compiled_programs()
    try:
        options.run(options)
    except (ValueError, OSError) as error:
        print(f"minimax-jax: {error}", file=sys.stderr)
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minimax-jax", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_generate(
        commands.add_parser("generate", allow_abbrev=False, help="answer prompts or chats")
    )
    _add_chat(commands.add_parser("chat", allow_abbrev=False, help="a chat in the terminal"))
    _add_inspect(commands.add_parser("inspect", help="what a checkpoint holds, without loading it"))
    _add_convert(commands.add_parser("convert", help="write a checkpoint in another format"))
    add_capacity(commands.add_parser("capacity", allow_abbrev=False, help="what fits on some GPUs"))
    add_plan(commands.add_parser("plan", allow_abbrev=False, help="what a layout sends and holds"))
    add_bench(commands.add_parser("bench", allow_abbrev=False, help="how fast a model's steps run"))
    return parser


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_inspect)
    parser.add_argument("path", help="bundled name, folder, or hub name")


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_convert)
    parser.add_argument("source", help="bundled name, folder, or hub name")
    parser.add_argument("destination", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--format", required=True, choices=("m3.1", "mxfp8", "bf16"))
    parser.add_argument("--layers", type=_layers, help="keep only these, as in 0,1,3,4")


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers as in 0,1,3") from None


def _inspect(options: argparse.Namespace) -> None:
    inspection = inspect_checkpoint(find(options.path))
    print_inspection(inspection)
    if inspection.problems:
        raise ValueError(f"{options.path} has {len(inspection.problems)} problems, listed above")


def _convert(options: argparse.Namespace) -> None:
    convert(find(options.source), options.destination, format=options.format, layers=options.layers)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_generate)
    _add_model(parser)
    add_mesh_flags(parser)
    what = parser.add_argument_group("what to answer (each may be repeated)")
    what.add_argument("--prompt", action="append", default=[], help="plain text to continue")
    what.add_argument(
        "--chat", action="append", default=[], help="a user's message, or messages as a JSON list"
    )
    chats = _add_thinking(parser)
    chats.add_argument("--tools", type=Path, help="a JSON file with a list of tool definitions")
    how = add_sampling_flags(parser)
    how.add_argument("--logprobs", type=int, help="likeliest tokens to report at each place")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_chat)
    _add_model(parser)
    chats = _add_thinking(parser)
    chats.add_argument("--system", help="what is said to the model before the chat")
    chats.add_argument("--tools", type=Path, help="a Python file of functions; it is executed")
    add_sampling_flags(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="bundled name, folder, or hub name")
    parser.add_argument("--revision", help="branch, tag or commit of a hub name")
    form = parser.add_argument_group("formats")
    form.add_argument("--dtype", choices=("float32", "bfloat16"), help="of activations")
    form.add_argument("--kv", choices=CACHE_FORMATS, help="format of cached keys and values")
    form.add_argument("--index", choices=CACHE_FORMATS, help="format of cached index keys")
    form.add_argument("--compute", choices=("exact", "e4m3"), default="exact")
    faster = parser.add_argument_group("speculative decoding, which changes no answer's law")
    faster.add_argument("--speculative", action="store_true", help="with the model's own drafter")
    faster.add_argument(
        "--speculative-config",
        metavar="JSON",
        help='as in \'{"method": "dspark", "num_speculative_tokens": 7}\'',
    )


def _add_thinking(parser: argparse.ArgumentParser) -> Any:
    chats = parser.add_argument_group("chats")
    chats.add_argument("--thinking-mode", choices=MODES, help="by default the template's own")
    chats.add_argument("--reasoning-effort", choices=NO_EFFORT + EFFORTS)
    return chats


def _load(
    options: argparse.Namespace, mesh: Mesh | None = None, rules: Rules = SERVE
) -> LoadedModel:
    text = options.speculative_config
    speculative = options.speculative if text is None else SpeculativeConfig.parse(text)
    loaded = load(
        options.model,
        dtype=options.dtype,
        kv=options.kv,
        index=options.index,
        compute=options.compute,
        revision=options.revision,
        speculative=speculative,
        mesh=mesh,
        rules=rules,
    )
    print(f"{options.model}: {loaded.report}", file=sys.stderr)
    if loaded.speculation is not None:
        print(f"speculation: {loaded.speculation}", file=sys.stderr)
    return loaded


def _answering(options: argparse.Namespace) -> Options:
    thinking = {
        "thinking_mode": options.thinking_mode,
        "reasoning_effort": options.reasoning_effort,
    }
    given = {k: v for k, v in thinking.items() if v is not None}
    return {**sampling_options(options), "template_options": given}


def _generate(options: argparse.Namespace) -> None:
    prompts: list[PromptLike] = [*options.prompt, *map(_read_chat, options.chat)]
    if not prompts:
        raise ValueError("nothing to answer: give --prompt or --chat")
    tools = [] if options.tools is None else read_tools(options.tools.read_text("utf-8"))
    joined(options, os.environ)
    loaded = _load(options, *mesh_and_rules(options))
    how: Options = {**_answering(options), "tools": tools, "logprobs": options.logprobs}
    completions = generate(loaded, prompts, **how)
    if jax.process_index() == 0:
        print_answers([*options.prompt, *options.chat], completions, as_json=options.json)


def _chat(options: argparse.Namespace) -> None:
    tools = None if options.tools is None else PythonTools.load(options.tools)
    loaded, how, console = _load(options), _answering(options), Console()

    def answer(messages: PromptLike, tools: list[Any], turns: TurnMemory) -> Iterator[Delta]:
        asked: Options = {**how, "tools": tools, "turns": turns}
        return generate(loaded, messages, stream=True, **asked)

    def read() -> str:
        line = console.input("[bold]> [/bold]")
        if not sys.stdin.isatty():
            console.print(line, markup=False)  # a script's questions belong between the answers
        return line

    chat = TerminalChat(answer=answer, console=console, tools=tools, system=options.system)
    chat.run(read)


def _read_chat(text: str) -> PromptLike:
    """A chat from the command line: JSON when it begins like JSON, else one user message."""
    if text.lstrip().startswith(("[", "{")):
        return read_messages(text)
    return [{"role": "user", "content": text}]


if __name__ == "__main__":
    main()
