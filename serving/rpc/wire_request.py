"""A `GenerateRequest` of the protocol as what our engine is asked.

Unset fields mean what they mean in vLLM: top_p 0 is 1, repetition_penalty 0 is 1, n 0 is 1, no
temperature is 1, no max_tokens is all the room there is. What we cannot do is refused by name.
Prompt texts are left to the caller, who has the tokenizer.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, Literal

from serving.scheduling.request import Asked
from serving.scheduling.sampling_params import SamplingParams, StructuredOutput

_UNSIGNED = 1 << 32  # a negative seed is read as its unsigned 32 bits
_ANY_SEED = -1  # as in vLLM
# What comes unset as 0 and is not 0 then.
_ZERO_IS_ONE = {"top_p": 1.0, "repetition_penalty": 1.0, "n": 1}
_AS_IT_IS = (
    *("top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens"),
    *("skip_special_tokens", "spaces_between_special_tokens", "ignore_eos"),
    "include_stop_str_in_output",
)
_OPTIONAL = ("max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
_Kind = Literal["json", "regex", "grammar", "structural_tag", "choice"]
_KINDS: dict[str, _Kind] = {
    "json_schema": "json",
    "json_object": "json",
    "regex": "regex",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
    "choice": "choice",
}


def asked(
    message: Any,
    prompt: Sequence[int],
    *,
    eos_token_ids: tuple[int, ...],
    vocab_size: int,
    adapter: str | None = None,
) -> Asked:
    """What a `GenerateRequest` asks, for a prompt of token ids.

    Raises ValueError with one sentence for values outside their range.
    """
    sampling = sampling_params(message.sampling_params)
    sampling.check_vocabulary(vocab_size)
    # Ids are unsigned on the wire, so the largest tells of all.
    if prompt and max(prompt) >= vocab_size:
        raise ValueError(f"the prompt has token {max(prompt)}, not in 0..{vocab_size - 1}")
    has_rank = message.HasField("data_parallel_rank")
    return Asked(
        request_id=message.request_id,
        prompt=prompt,
        sampling=sampling,
        eos_token_ids=eos_token_ids,
        adapter=adapter,
        rank=message.data_parallel_rank if has_rank else None,
    )


def check_supported(message: Any) -> None:
    """Raises ValueError that names the first thing in a `GenerateRequest` that we cannot do."""
    if message.HasField("mm_inputs") or message.extra_mm_inputs:
        raise ValueError("mm_inputs: images, video and sound are not supported, only text is")
    if message.HasField("media_refs"):
        raise ValueError("media_refs: images, video and sound are not supported, only text is")
    if message.HasField("kv_transfer_params") or message.kv_transfer_params_json not in ("", "{}"):
        raise ValueError(
            "kv_transfer_params: this engine prefills and decodes itself and takes no keys over"
        )
    if message.WhichOneof("input") is None:
        raise ValueError("the request has no input: expected tokenized or text")


def sampling_params(message: Any) -> SamplingParams:
    """The protocol's `SamplingParams`, with unset fields as vLLM reads them."""
    values: dict[str, Any] = {name: _rounded(getattr(message, name)) for name in _AS_IT_IS}
    values |= {name: _rounded(getattr(message, name)) or one for name, one in _ZERO_IS_ONE.items()}
    values |= {
        name: getattr(message, name) if message.HasField(name) else None for name in _OPTIONAL
    }
    if message.HasField("temperature"):
        values["temperature"] = _rounded(message.temperature)
    return SamplingParams(
        **values,
        seed=_seed(message),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias={token: _rounded(bias) for token, bias in message.logit_bias.items()},
        structured_outputs=_structured(message),
    )


def _rounded(value: Any) -> Any:
    """A 32-bit float as the shortest decimal that stands for it: 0.7, not 0.699999988."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    return float(f"{value:.7g}")


def _seed(message: Any) -> int | None:
    if not message.HasField("seed") or message.seed == _ANY_SEED:
        return None
    return message.seed % _UNSIGNED


def _structured(message: Any) -> StructuredOutput | None:
    name = message.WhichOneof("constraint")
    if name is None or (name == "json_object" and not message.json_object):
        return None
    if name == "json_object":
        text = '{"type": "object"}'
    elif name == "choice":
        text = _choices(message.choice.choices)
    else:
        text = getattr(message, name)
    if not text:
        raise ValueError(f"{name} is empty")
    return StructuredOutput(
        kind=_KINDS[name], text=text, from_first_token=message.grammar_from_first_token
    )


def _choices(choices: Sequence[str]) -> str:
    """Choices as a JSON list, the text of a structured output of that kind."""
    if not choices:
        raise ValueError("choice has no choices")
    return json.dumps(list(choices), ensure_ascii=False)
