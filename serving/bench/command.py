"""`minimax-serve bench`: flags in, a table, a JSON file and a picture out.

minimax-serve bench --random-input-len 512 --max-concurrency 8 --num-prompts 200
minimax-serve bench --dataset-name agentic --max-concurrency 4 --save-result --plot bench.png
minimax-serve bench --backend openai-chat --tokenizer tiny --sweep 1,2,4,8 --price 6
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from configs.cli import add_flags, from_flags
from configs.parts import check
from serving.bench.options import (
    Agentic,
    Bench,
    Dataset,
    Objectives,
    Report,
    Sampling,
    Target,
    Traffic,
)
from serving.bench.reports import run_once, run_sweep
from serving.bench.run import Setting, make_client, when_ready
from serving.bench.workload import Texts

PROG = "minimax-serve bench"
PARTS = {
    "target": Target,
    "traffic": Traffic,
    "sampling": Sampling,
    "dataset": Dataset,
    "agentic": Agentic,
    "report": Report,
}
Result = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command, which ends the process: with code 2 and a sentence for bad flags, and with 1
    when a run completed no request.
    """
    try:
        bench = read_flags(_parser().parse_args(arguments))
        all_results = asyncio.run(_bench(bench, Console()))
    except ValueError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0 if all(result["completed"] for result in all_results) else 1)


def read_flags(parsed: argparse.Namespace) -> Bench:
    """What the flags ask for. Raises ValueError with a sentence."""
    parts: dict[str, Any] = {name: from_flags(part, parsed) for name, part in PARTS.items()}
    report = parts["report"]
    check(Path(report.result_dir).is_dir(), f"result_dir={report.result_dir!r} is no folder")
    folder = Path(report.plot or "").parent
    check(folder.is_dir(), f"plot={report.plot!r} is in no folder that exists")
    return Bench(objectives=Objectives.parse(parsed.goodput), **parts)


def _parser() -> argparse.ArgumentParser:
    """The flags, in a group a part."""
    description = "Measures a running server."
    parser = argparse.ArgumentParser(prog=PROG, description=description, allow_abbrev=False)
    for name, part in PARTS.items():
        add_flags(parser.add_argument_group(name), part)
    help_goodput = "objectives in ms, of ttft, tpot and e2el, such as ttft:500 tpot:50"
    parser.add_argument("--goodput", nargs="+", default=[], help=help_goodput)
    return parser


async def _bench(bench: Bench, console: Console) -> list[Result]:
    texts = Texts.load(bench.target.tokenizer)
    client = make_client(bench)
    try:
        facts = await when_ready(client, bench.target.ready_check_timeout_sec, console)
        setting = Setting(client=client, facts=facts, texts=texts, console=console)
        # What is there by then is still reported.
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, setting.stop.set)
        return await (run_once if bench.report.sweep is None else run_sweep)(bench, setting)
    finally:
        await client.close()
