"""What `minimax-jax generate` prints: answers as text for a reader, or as JSON for a program."""

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from minimax_jax.completion import Completion
from minimax_jax.speculative.stats import SpeculationStats

SHOWN_LINES = 6  # of a question, above its answer


def print_answers(
    asked: Sequence[str], completions: Sequence[Completion], *, as_json: bool
) -> None:
    """Prints each completion under what was asked, or as one JSON object a line; below the text of
    all, what speculation came to.
    """
    if as_json:
        for completion in completions:
            print(json.dumps(completion_json(completion), ensure_ascii=False))
        return
    for prompt, completion in zip(asked, completions, strict=True):
        _print_text(prompt, completion)
    parts = [one.speculation for one in completions if one.speculation is not None]
    if parts:
        print(f"speculation: {SpeculationStats.total(parts)}")


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
    if completion.message is not None and completion.message.tool_calls:
        record["tool_calls"] = completion.message.to_dict()["tool_calls"]
    if completion.speculation is not None:
        record["speculation"] = completion.speculation.to_dict()
    if completion.logprobs is not None:
        record["logprobs"] = [
            {"token_id": one.token_id, "logprob": one.logprob, "top": [list(t) for t in one.top]}
            for one in completion.logprobs
        ]
    return record


def _print_text(prompt: str, completion: Completion) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]{escape(_shortened(prompt))}[/bold]")
    if completion.reasoning is not None:
        thought = completion.reasoning.replace("\n", "\n           ")
        console.print(f"[dim]  thought  {escape(thought)}[/dim]")
    answer = completion.text if completion.text is not None else str(list(completion.token_ids))
    for call in [] if completion.message is None else completion.message.tool_calls:
        console.print(f"  call     {escape(call.name)} {escape(call.arguments)}")
    cut = (
        ""
        if completion.finish_reason in ("stop", "tool_calls")
        else f"  ({completion.finish_reason})"
    )
    console.print(f"  answer   {escape(answer)}[dim]{cut}[/dim]")


def _shortened(prompt: str) -> str:
    """A long prompt's first lines and its last one."""
    lines = prompt.splitlines()
    if len(lines) <= SHOWN_LINES:
        return prompt
    head, left_out = lines[: SHOWN_LINES - 2], len(lines) - SHOWN_LINES + 1
    return "\n".join([*head, f"({left_out} more lines)", lines[-1]])
