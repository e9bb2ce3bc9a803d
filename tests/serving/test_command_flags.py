"""The flags of `minimax-serve`: what a user of vLLM types is honoured, answered or refused."""

import re
import shlex
from pathlib import Path

import pytest

from configs.parallel import ParallelConfig
from serving.command import nested, objects, others
from serving.command.flags import make_parser, parse
from serving.command.nested import read_objects

# Launch lines of the reference with `vllm serve` replaced, as the serving specification describes
# them: what belongs to NVIDIA's and to AMD's cards.
NVIDIA = """
minimax-serve MiniMaxAI/MiniMax-M3.1-Flash -tp 4 --enable-expert-parallel --block-size 128
  --max-model-len 256K --kv-cache-dtype nvfp4 --attention-config '{"indexer_kv_dtype":"nvfp4"}'
  --speculative-config '{"method":"dspark","model":"MiniMaxAI/MiniMax-M3.1-Flash",
    "num_speculative_tokens":7,"draft_sample_method":"probabilistic","kv_cache_dtype":"fp8",
    "attention_backend":"FLASHINFER_TS"}'
  --reasoning-parser minimax_m3 --tool-call-parser minimax_m3 --enable-auto-tool-choice
  --disable-hybrid-kv-cache-manager --trust-remote-code --mm-processor-cache-type shm
"""
AMD = """
minimax-serve MiniMaxAI/MiniMax-M3.1-Flash -tp 4 --enable-expert-parallel --block-size 128
  --kv-cache-dtype fp8 --attention-config '{"indexer_decode_cp":true}'
  --quantization-config.moe mxfp8 --gpu-memory-utilization 0.9
  --speculative-config.method dspark --speculative-config.num_speculative_tokens 3
  --speculative-config.attention_backend TRITON_ATTN
  --reasoning-parser minimax_m3 --tool-call-parser minimax_m3 --enable-auto-tool-choice
"""


def asked(line: str):
    program, *arguments = shlex.split(line)
    assert program == "minimax-serve"
    return parse(arguments)


def refusal(line: str) -> str:
    with pytest.raises(ValueError) as error:
        asked(f"minimax-serve {line}")
    text = str(error.value)
    assert "\n" not in text
    return text


def test_the_launch_line_for_nvidia_cards_means_what_it_says():
    it = asked(NVIDIA)
    assert it.model == "MiniMaxAI/MiniMax-M3.1-Flash"
    assert it.parallel == ParallelConfig.parse("tp4,ep")
    assert (it.load.kv, it.load.index) == ("nvfp4", "nvfp4")
    assert it.engine == {"block_size": "128", "max_model_len": str(256 * 1024)}
    assert it.speculative is not None and it.experts is None
    assert it.speculative.num_speculative_tokens == 7
    assert it.speculative.cache_format("bf16") == "fp8"
    said = "\n".join(it.lines)
    for name in ("FLASHINFER_TS", "auto-tool-choice", "hybrid-kv-cache", "trust-remote", "mm-proc"):
        assert said.count(name) == 1
    assert len(it.lines) == 5


def test_the_launch_line_for_amd_cards_means_what_it_says():
    it = asked(AMD)
    assert it.parallel == ParallelConfig.parse("tp4,dcp4,ep")
    assert (it.load.kv, it.load.index, it.experts) == ("fp8", None, "mxfp8")
    assert it.speculative is not None
    assert it.speculative.num_speculative_tokens == 3
    assert it.engine["gpu_memory_utilization"] == "0.9"
    assert any("TRITON_ATTN: dispatch chooses" in line for line in it.lines)


# Every flag that section 4.1 of the serving specification names, with a value where it takes one.
SPECIFIED = """
--host 0.0.0.0|--port 50052|--uds /x|--api-key k|--served-model-name a b|--tokenizer x
--chat-template f|--revision r|--seed 3|--tensor-parallel-size 2|-tp 2|--data-parallel-size 2|-dp 2
--data-parallel-size-local 1|--data-parallel-address a|--data-parallel-rpc-port 1
--pipeline-parallel-size 1|-pp 2|--decode-context-parallel-size 2|-dcp 2|--enable-expert-parallel
-ep|--all2all-backend x|--enable-eplb|--max-model-len 25.6k|--max-num-seqs 8
--max-num-batched-tokens 16K|--gpu-memory-utilization 0.5|--kv-cache-memory-bytes 5
--num-gpu-blocks-override 9|--block-size 128|--kv-cache-dtype fp8_e4m3
--attention-config.indexer_kv_dtype nvfp4|--enable-prefix-caching|--no-enable-prefix-caching
--enable-chunked-prefill|--async-scheduling|--scheduling-policy priority
--speculative-config {"method":"dspark"}|--reasoning-parser x|--tool-call-parser x
--enable-auto-tool-choice|--kv-transfer-config {"kv_connector":"NixlConnector"}
--kv-events-config {"enable_kv_cache_events":true}
--structured-outputs-config {"backend":"xgrammar"}
--compilation-config {"level":3}|--limit-mm-per-prompt {"image":0}|--mm-encoder-attn-backend x
--mm-processor-cache-type shm|--grpc|--trust-remote-code|--enable-lora|--max-loras 2
--max-lora-rank 16|--disable-log-stats|--enable-log-requests|--load-format dummy
"""


@pytest.mark.parametrize("flag", re.split(r"[|\n]", SPECIFIED.strip()))
def test_every_flag_of_the_specification_is_honoured_answered_or_refused_by_name(flag):
    name, *value = flag.split(" ")
    named = "--pipeline" if name == "-pp" else name.partition(".")[0]
    try:
        it = parse(["m", "-tp", "4", name, *value])
    except ValueError as error:
        assert named in str(error) and "unknown" not in str(error)
        return
    assert it != parse(["m", "-tp", "4"]), "neither honoured nor answered"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("m --max-model-length 4", "--max-model-length is unknown: do you mean --max-model-len?"),
        ("m --tp 4", "--tp is unknown: its name here is --tensor-parallel-size"),
        ("m --quite-else", "--quite-else is unknown; --help lists all"),
        ("m n", "there is one MODEL, and 'n' is a second one"),
        ("", "the following arguments are required: MODEL"),
        ("m --max-num-seqs many", "expected"),
        ("m --pipeline-parallel-size 2", "there are no pipeline stages, only -tp"),
        ("m --no-enable-chunked-prefill", "it cannot be turned off"),
        ("m --attention-config '{\"x\":1}'", "--attention-config has no x; it has backend, "),
        ("m --attention-config nvfp4", "--attention-config 'nvfp4' is not JSON"),
        ("m --attention-config '[1]'", "is not a JSON object"),
        ("m --attention-config", "--attention-config has no value"),
        ("m --attention-config.indexer_decode_cp yes", "indexer_decode_cp='yes' is neither true"),
        ("m --speculative-config.method eagle3", "method='eagle3' is not one of dspark"),
        ("m --speculative-config.model other/draft", "the drafter is that of m"),
        ("m --limit-mm-per-prompt '{\"image\": 2}'", "only text is supported"),
        ("m --kv-transfer-config.kv_connector Nixl", "prefills and decodes itself"),
        ("m --http 50051", "--port and --http are both 50051"),
        ("m --port 70000", "port=70000 is not in 0..65535"),
        ("m -tp 3 -dcp 2", "dcp=2 does not divide tp=3"),
        ("m -tp 2 --parallel tp4", "say it twice"),
        ("m --lora a", "--lora 'a' is not of the form name=path"),
        ("m --lora a=/nowhere", "there is no adapter_config.json in /nowhere"),
        ("m --api-key a --api-key-file b", "two ways"),
        ("m --max-model-len 1.0001k", "1.0001k is no whole number"),
        ("m --kv-cache-dtype fp4", "kv_cache_dtype='fp4' is not one of auto"),
    ],
)
def test_what_cannot_be_is_one_sentence(line, sentence):
    if sentence == "expected":  # the engine's own fields are read when the model is known
        assert parse(shlex.split(line)).engine == {"max_num_seqs": "many"}
    else:
        assert sentence in refusal(line)


def test_both_spellings_of_an_object_are_one_and_dots_reach_into_it():
    whole = read_objects(["m", "--compilation-config", '{"a": {"b": 1}, "c": "x"}'])
    dotted = read_objects(
        ["m", "--compilation_config.a.b=1", "--compilation-config.c", "x"],
    )
    assert whole == dotted == (["m"], {"compilation-config": {"a": {"b": 1}, "c": "x"}})
    listed = read_objects(["--compilation-config.s+", "1", "--compilation-config.s+", "2"])
    assert listed == ([], {"compilation-config": {"s": [1, 2]}})
    with pytest.raises(ValueError, match="reaches into a, which was given a value"):
        read_objects(["--compilation-config.a", "1", "--compilation-config.a.b", "2"])


def test_sizes_take_units_of_a_thousand_and_of_1024():
    sizes = [parse(["m", "--max-model-len", text]).engine["max_model_len"] for text in SIZES]
    assert sizes == list(SIZES.values())
    assert read_objects(["m", "--revision", "25k"])[0] == ["m", "--revision", "25k"]


SIZES = {"1k": "1000", "1K": "1024", "25.6k": "25600", "1M": "1048576", "77": "77"}


def test_adapters_are_folders_by_name(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{}")
    line = ["m", "--lora", f"a={tmp_path}", "--lora-modules", f"b={tmp_path}"]
    assert parse(line).adapters == {"a": tmp_path, "b": tmp_path}
    with pytest.raises(ValueError, match="names 'a' twice"):
        parse([*line, "--lora", f"a={tmp_path}"])


def test_no_flag_hides_another_and_every_answer_can_be_asked_for():
    known = set(make_parser()._option_string_actions)
    assert {f"--{name}" for name in others.SWITCHES | others.VALUES} <= known
    assert set(others.ELSEWHERE) & known == set()
    targets = {flag for flag in others.ELSEWHERE.values() if flag.startswith("--")}
    assert targets - {"--speculative-config"} <= known
    assert set(objects.MEANINGS) | {"speculative-config"} == set(nested.OBJECTS)
