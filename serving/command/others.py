"""vLLM's other flags: each is accepted with a line that says what it means here, or refused by
name.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

Answer = Callable[[Any], str]  # the line; ValueError with a sentence refuses


def _always(line: str) -> Answer:
    """A switch of what is so anyway."""

    def answer(given: Any) -> str:
        if given is False:
            raise ValueError(f"it cannot be turned off: {line}")
        return line

    return answer


def _unused(line: str) -> Answer:
    return lambda given: line


def _refused(reason: str) -> Answer:
    def answer(given: Any) -> str:
        raise ValueError(reason)

    return answer


def _only(allowed: str, line: str, reason: str) -> Answer:
    """One value that changes nothing; others are refused."""

    def answer(given: Any) -> str:
        if given != allowed:
            raise ValueError(reason)
        return line

    return answer


def _off(reason: str) -> Answer:
    """A switch of what is not there: off is fine."""

    def answer(given: Any) -> str:
        if given:
            raise ValueError(reason)
        return "it is always off"

    return answer


ONE_SCHEDULER = "one process schedules all data ranks; --distributed joins several processes"
NO_VISION = "there is no vision tower yet, so nothing reads it"
SWITCHES: dict[str, Answer] = {
    "trust-remote-code": _unused("no remote code is ever run"),
    "enable-chunked-prefill": _always("long prompts are always taken in chunks"),
    "enable-auto-tool-choice": _always("the gateway always reads tool calls"),
    "disable-hybrid-kv-cache-manager": _always("one pool of blocks holds all layers, always"),
    "grpc": _always("gRPC is always on, at --port"),
    "enable-lora": _unused("adapters are named by --lora name=path"),
    "enable-eplb": _off("experts are not moved between devices"),
    "enforce-eager": _off("every step is a compiled program"),
}
VALUES: dict[str, Answer] = {
    "pipeline-parallel-size": _only("1", "one stage", "there are no pipeline stages, only -tp"),
    "data-parallel-size-local": _refused(ONE_SCHEDULER),
    "data-parallel-address": _refused(ONE_SCHEDULER),
    "data-parallel-rpc-port": _refused(ONE_SCHEDULER),
    "all2all-backend": _unused("the compiler chooses the collectives"),
    "uds": _refused("there is no Unix socket: --host and --port say where gRPC listens"),
    "tokenizer": _refused("the tokenizer is that of the model's folder"),
    "kv-cache-memory-bytes": _refused("--num-gpu-blocks-override says how many blocks there are"),
    "max-loras": _unused("all adapters that --lora names are held"),
    "max-lora-rank": _unused("an adapter's rank is that of its file"),
    "mm-encoder-attn-backend": _unused(NO_VISION),
    "mm-processor-cache-type": _unused(NO_VISION),
}
ALIASES = {"pipeline-parallel-size": ("-pp",)}
# Names of other engines, as answers to an unknown flag.
ELSEWHERE = {
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--dp": "--data-parallel-size",
    "--dp-size": "--data-parallel-size",
    "--attn-dp-size": "--data-parallel-size",
    "--ep": "--enable-expert-parallel",
    "--ep-size": "--enable-expert-parallel",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--context-length": "--max-model-len",
    "--max-running-requests": "--max-num-seqs",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--page-size": "--block-size",
    "--speculative-algorithm": "--speculative-config",
    "--speculative-num-draft-tokens": "--speculative-config",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--model-path": "MODEL, which comes first",
    "--model": "MODEL, which comes first",
}


def add_others(parser: argparse.ArgumentParser) -> None:
    """Lets the parser take them; the help does not list them."""
    common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, **common)
    for name in VALUES:
        parser.add_argument(f"--{name}", *ALIASES.get(name, ()), **common)


def answers(given: Mapping[str, Any]) -> list[str]:
    """A line for each of them that was given. Raises ValueError that names the first refused."""
    lines = []
    for name, answer in (SWITCHES | VALUES).items():
        key = name.replace("-", "_")
        if key in given:
            lines.append(_line(name, answer, given[key]))
    return lines


def unknown(flag: str, known: Sequence[str]) -> str:
    """The sentence about an argument that no flag takes."""
    flag = flag.partition("=")[0]
    if not flag.startswith("-"):
        return f"there is one MODEL, and {flag!r} is a second one"
    if flag in ELSEWHERE:
        return f"{flag} is unknown: its name here is {ELSEWHERE[flag]}"
    near = get_close_matches(flag, known, n=1)
    return f"{flag} is unknown" + (f": do you mean {near[0]}?" if near else "; --help lists all")


def _line(name: str, answer: Answer, given: Any) -> str:
    try:
        return f"--{name}: {answer(given)}"
    except ValueError as error:
        raise ValueError(f"--{name} is refused: {error}") from error
