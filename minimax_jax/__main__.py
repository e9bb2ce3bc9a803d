"""The command `minimax-jax`: generate, inspect, convert."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from configs.parts import CACHE_FORMATS
from minimax_jax.chat import read_messages
from minimax_jax.compiled import keep_compiled_programs
from minimax_jax.completion import Completion
from minimax_jax.convert import convert
from minimax_jax.generate import PromptLike, generate
from minimax_jax.inspect import inspect_checkpoint, print_inspection
from minimax_jax.loaded import find, load


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command; a user's mistake is one sentence on standard error and exit code 2."""
    options = _parser().parse_args(arguments)
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
    _add_inspect(commands.add_parser("inspect", help="what a checkpoint holds, without loading it"))
    _add_convert(commands.add_parser("convert", help="write a checkpoint in another format"))
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
    parser.add_argument("--model", required=True, help="bundled name, folder, or hub name")
    parser.add_argument("--revision", help="branch, tag or commit of a hub name")
    what = parser.add_argument_group("what to answer (each may be repeated)")
    what.add_argument("--prompt", action="append", default=[], help="plain text to continue")
    what.add_argument(
        "--chat", action="append", default=[], help="a user's message, or messages as a JSON list"
    )
    how = parser.add_argument_group("sampling")
    how.add_argument("--max-tokens", type=int, default=256)
    how.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (the default)")
    how.add_argument("--top-p", type=float, default=1.0)
    how.add_argument("--top-k", type=int, default=0, help="0: off")
    how.add_argument("--min-p", type=float, default=0.0)
    how.add_argument("--seed", type=int, default=0)
    how.add_argument("--stop", action="append", default=[], help="a stop string (repeatable)")
    how.add_argument("--logprobs", type=int, help="likeliest tokens to report at each place")
    form = parser.add_argument_group("formats")
    form.add_argument("--dtype", choices=("float32", "bfloat16"), help="of activations")
    form.add_argument("--kv", choices=CACHE_FORMATS, help="format of cached keys and values")
    form.add_argument("--index", choices=CACHE_FORMATS, help="format of cached index keys")
    form.add_argument("--compute", choices=("exact", "e4m3"), default="exact")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def _generate(options: argparse.Namespace) -> None:
    prompts: list[PromptLike] = [*options.prompt, *map(_chat, options.chat)]
    if not prompts:
        raise ValueError("nothing to answer: give --prompt or --chat")
    loaded = load(
        options.model,
        dtype=options.dtype,
        kv=options.kv,
        index=options.index,
        compute=options.compute,
        revision=options.revision,
    )
    print(f"{options.model}: {loaded.report}", file=sys.stderr)
    completions = generate(
        loaded,
        prompts,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        seed=options.seed,
        stop=options.stop,
        logprobs=options.logprobs,
    )
    show = _print_json if options.json else _print_text
    for prompt, completion in zip([*options.prompt, *options.chat], completions, strict=True):
        show(prompt, completion)


def _chat(text: str) -> PromptLike:
    """A chat from the command line: JSON when it begins like JSON, else one user message."""
    if text.lstrip().startswith(("[", "{")):
        return read_messages(text)
    return [{"role": "user", "content": text}]


def _print_json(prompt: str, completion: Completion) -> None:
    print(json.dumps(completion_json(completion), ensure_ascii=False))


def completion_json(completion: Completion) -> dict[str, Any]:
    """A completion in the terms of the OpenAI API."""
    record = {
        "text": completion.text,
        "reasoning": completion.reasoning,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "usage": completion.usage.to_dict(),
        "seconds": round(completion.seconds, 3),
    }
    if completion.logprobs is not None:
        record["logprobs"] = [
            {"token_id": one.token_id, "logprob": one.logprob, "top": [list(t) for t in one.top]}
            for one in completion.logprobs
        ]
    return record


def _print_text(prompt: str, completion: Completion) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]{escape(prompt)}[/bold]")
    if completion.reasoning is not None:
        console.print(f"[dim]  thought  {escape(completion.reasoning)}[/dim]")
    answer = completion.text if completion.text is not None else str(list(completion.token_ids))
    cut = "" if completion.finish_reason == "stop" else f"  ({completion.finish_reason})"
    console.print(f"  answer   {escape(answer)}[dim]{cut}[/dim]")


if __name__ == "__main__":
    main()
