"""Tool results in the order of the calls that they answer.

M3's template tells results apart by their order alone, while clients name calls by id and may
answer them in any order.
"""

from typing import Any

Indexed = tuple[int, dict[str, Any]]  # a message and its place in what the client sent


def in_call_order(messages: list[Indexed]) -> list[dict[str, Any]]:
    """The messages with each run of tool results sorted by the calls before it.

    Results or calls without ids stay where they are. Raises ValueError for a result whose id is not
    among the calls, for one given twice, and for calls left without an answer before the
    conversation goes on.
    """
    ordered: list[dict[str, Any]] = []
    place = 0
    while place < len(messages):
        index, message = messages[place]
        place += 1
        ordered.append(message)
        if message.get("tool_calls"):
            results = _run_of_results(messages, place)
            if place < len(messages):
                ordered += _sorted(index, _ids(message), results)
            place += len(results)
    return ordered


def _run_of_results(messages: list[Indexed], start: int) -> list[Indexed]:
    end = start
    while end < len(messages) and messages[end][1]["role"] == "tool":
        end += 1
    return messages[start:end]


def _ids(message: dict[str, Any]) -> list[Any]:
    return [call.get("id") for call in message["tool_calls"]]


def _sorted(index: int, calls: list[Any], results: list[Indexed]) -> list[dict[str, Any]]:
    answers = [result.get("tool_call_id") for _, result in results]
    if None in calls or None in answers or len(set(calls)) < len(calls):
        return [result for _, result in results]
    for (place, _), answer in zip(results, answers, strict=True):
        if answer not in calls:
            raise ValueError(
                f"message {place} answers the tool call {answer!r}: message {index} made {calls}"
            )
    if len(set(answers)) < len(answers):
        raise ValueError(f"a tool call of message {index} is answered twice: {answers}")
    missing = [call for call in calls if call not in answers]
    if missing:
        raise ValueError(f"the tool calls {missing} of message {index} are not answered")
    return [result for call in calls for _, result in results if result["tool_call_id"] == call]
