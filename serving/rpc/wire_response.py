"""What the engine gives as the protocol's responses.

A stream is chunks of new ids alone, then one `complete` a sequence that repeats none of them: a
reader adds them up. Without a stream each sequence is one `complete` of everything.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from smg_grpc_proto.generated import vllm_engine_pb2 as messages

from serving.engine_api import Logprobs, Output


def answerer(stream: bool) -> Callable[[Output], Iterator[Any]]:
    """What makes responses of a request's outputs, one after the other."""
    return _news if stream else _Whole().responses


def _news(output: Output) -> Iterator[Any]:
    """The responses of a stream to one output: the new tokens as a chunk, and the end."""
    if output.token_ids or output.prompt_logprobs is not None:
        chunk = messages.GenerateStreamChunk(
            token_ids=output.token_ids,
            prompt_tokens=output.prompt_tokens,
            completion_tokens=len(output.token_ids),
            cached_tokens=output.cached_tokens,
            output_logprobs=_output_logprobs(output.logprobs),
            input_logprobs=_input_logprobs(output.prompt_logprobs),
            index=output.index,
        )
        yield messages.GenerateResponse(chunk=chunk)
    if output.finish_reason is not None:
        yield _complete(output, [], [], None)


class _Whole:
    """Collects the outputs of a request's sequences until each has ended."""

    def __init__(self) -> None:
        self._ids: dict[int, list[int]] = {}
        self._logprobs: dict[int, list[Logprobs]] = {}
        self._prompt_logprobs: dict[int, Logprobs] = {}

    def responses(self, output: Output) -> Iterator[Any]:
        """Takes an output in; the sequence's one response if it has ended."""
        index = output.index
        self._ids.setdefault(index, []).extend(output.token_ids)
        if output.logprobs is not None:
            self._logprobs.setdefault(index, []).append(output.logprobs)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index] = output.prompt_logprobs
        if output.finish_reason is not None:
            logprobs = self._logprobs.pop(index, [])
            prompt_logprobs = self._prompt_logprobs.pop(index, None)
            yield _complete(output, self._ids.pop(index), logprobs, prompt_logprobs)


def _complete(
    output: Output,
    token_ids: Sequence[int],
    logprobs: Sequence[Logprobs],
    prompt_logprobs: Logprobs | None,
) -> Any:
    complete = messages.GenerateComplete(
        output_ids=token_ids,
        finish_reason=output.finish_reason,
        prompt_tokens=output.prompt_tokens,
        completion_tokens=len(token_ids),
        cached_tokens=output.cached_tokens,
        output_logprobs=_output_logprobs(*logprobs),
        input_logprobs=_input_logprobs(prompt_logprobs),
        index=output.index,
        spec_accepted_tokens=output.accepted_tokens,
        spec_draft_tokens=output.draft_tokens,
    )
    if isinstance(output.matched_stop, str):
        complete.matched_stop_str = output.matched_stop
    elif output.matched_stop is not None:
        complete.matched_token_id = output.matched_stop
    return messages.GenerateResponse(complete=complete)


def _output_logprobs(*parts: Logprobs | None) -> Any:
    given = [part for part in parts if part is not None]
    if not given:
        return None
    result = messages.OutputLogProbs()
    for part in given:
        result.token_ids.extend(part.token_ids)
        result.token_logprobs.extend(cast("Sequence[float]", part.values))
        result.top_logprobs.extend(_tops(part))
    return result


def _input_logprobs(part: Logprobs | None) -> Any:
    if part is None:
        return None
    values = [messages.InputTokenLogProb(value=value) for value in part.values]
    return messages.InputLogProbs(
        token_ids=part.token_ids, token_logprobs=values, top_logprobs=_tops(part)
    )


def _tops(part: Logprobs) -> Iterator[Any]:
    for ids, values in zip(part.top_ids, part.top_values, strict=True):
        yield messages.TopLogProbs(token_ids=ids, values=values)
