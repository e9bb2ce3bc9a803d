"""What a `GenerateRequest` asks: unset fields, set ones, and what is refused by name."""

import math

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as messages

from serving.rpc.wire_request import asked, check_supported, sampling_params
from serving.scheduling.sampling_params import SamplingParams, StructuredOutput
from tests.serving.servers import request


def read(**fields) -> SamplingParams:
    return sampling_params(messages.SamplingParams(**fields))


def test_unset_fields_mean_what_they_mean_in_vllm():
    assert read() == SamplingParams(
        max_tokens=None, skip_special_tokens=False, spaces_between_special_tokens=False
    )
    assert sampling_params(messages.GenerateRequest().sampling_params) == read()


FIELDS = {
    "temperature": 0.7,
    "top_p": 0.95,
    "top_k": 40,
    "min_p": 0.05,
    "frequency_penalty": -0.5,
    "presence_penalty": 1.5,
    "repetition_penalty": 1.1,
    "max_tokens": 9,
    "min_tokens": 3,
    "stop": ("a", "b"),
    "stop_token_ids": (5, 6),
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "ignore_eos": True,
    "n": 3,
    "logprobs": 4,
    "prompt_logprobs": 0,
    "seed": 11,
    "include_stop_str_in_output": True,
    "logit_bias": {4: 0.3, 5: -100.0},
    "truncate_prompt_tokens": -1,
}


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_a_set_field_arrives_as_it_was_written(name):
    value = FIELDS[name]
    found = getattr(read(**{name: value}), name)
    assert (type(found), found) == (type(value), value)


def test_the_table_of_fields_is_the_protocols():
    constraints = {"json_schema", "regex", "grammar", "structural_tag", "json_object", "choice"}
    others = constraints | {"grammar_from_first_token"}
    assert set(messages.SamplingParams.DESCRIPTOR.fields_by_name) == FIELDS.keys() | others


def test_zero_is_greedy_where_it_is_written():
    assert read(temperature=0.0).is_greedy and not read().is_greedy


@pytest.mark.parametrize(("wire", "seed"), [(0, 0), (-1, None), (-2, 2**32 - 2)])
def test_a_negative_seed_is_one_too(wire, seed):
    assert read(seed=wire).seed == seed


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"json_schema": '{"type": "array"}'}, "json", '{"type": "array"}'),
        ({"json_object": True}, "json", '{"type": "object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": "root ::= x"}, "grammar", "root ::= x"),
        ({"structural_tag": "{}"}, "structural_tag", "{}"),
        ({"choice": {"choices": ["ja", "né"]}}, "choice", '["ja", "né"]'),
    ],
)
def test_constraints_become_structured_outputs(fields, kind, text):
    wanted = StructuredOutput(kind=kind, text=text)
    assert read(**fields).structured_outputs == wanted
    bound = read(**fields, grammar_from_first_token=True).structured_outputs
    assert bound is not None and bound.from_first_token


def test_no_json_object_is_no_constraint():
    assert read(json_object=False).structured_outputs is None


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"n": 129}, "n=129 is not in 1..128"),
        ({"temperature": -1}, "temperature=-1.0 is not"),
        ({"temperature": math.nan}, "temperature=nan is not"),
        ({"top_p": 1.5}, "top_p=1.5 is not in (0, 1]"),
        ({"top_p": math.nan}, "top_p=nan is not in (0, 1]"),
        ({"min_p": math.inf}, "min_p=inf is not in [0, 1]"),
        ({"repetition_penalty": -1}, "repetition_penalty=-1.0 is not above 0"),
        ({"presence_penalty": math.nan}, "presence_penalty=nan is not in [-2, 2]"),
        ({"max_tokens": 0}, "max_tokens=0 is not at least 1"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens=3 is more than max_tokens=2"),
        ({"logprobs": -1}, "logprobs=-1 is negative"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0 is neither"),
        ({"logit_bias": {1: math.inf}}, "logit_bias of token 1 is inf"),
        ({"stop": [""]}, "has an empty text"),
        ({"regex": ""}, "regex is empty"),
        ({"choice": {}}, "choice has no choices"),
    ],
)
def test_a_value_outside_its_range_is_refused(fields, sentence):
    with pytest.raises(ValueError) as error:
        read(**fields)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompt": [10, 1000]}, "the prompt has token 1000, not in 0..999"),
        ({"stop_token_ids": [1000]}, "stop_token_ids names token 1000"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias names token -1"),
    ],
)
def test_a_token_outside_the_vocabulary_is_refused(fields, sentence):
    message = request(**fields)
    with pytest.raises(ValueError) as error:
        asked(message, list(message.tokenized.input_ids), eos_token_ids=(), vocab_size=1000)
    assert sentence in str(error.value)


def test_a_data_rank_is_pinned_only_when_it_is_set():
    def rank(**fields):
        return asked(request(**fields), [1], eos_token_ids=(), vocab_size=9).rank

    assert (rank(), rank(data_parallel_rank=0)) == (None, 0)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"mm_inputs": {}}, "mm_inputs"),
        ({"extra_mm_inputs": [{}]}, "mm_inputs"),
        ({"media_refs": {}}, "media_refs"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"kv_transfer_params_json": '{"do_remote_prefill": true}'}, "kv_transfer_params"),
    ],
)
def test_what_we_cannot_do_is_refused_by_name(fields, name):
    with pytest.raises(ValueError) as error:
        check_supported(request(**fields))
    assert name in str(error.value)


def test_a_request_needs_an_input_and_an_empty_transfer_is_none():
    check_supported(request(kv_transfer_params_json="{}"))
    with pytest.raises(ValueError) as error:
        check_supported(messages.GenerateRequest(request_id="r"))
    assert "has no input" in str(error.value)
