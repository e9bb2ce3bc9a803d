"""`minimax-serve` before the weights: what the model and the machine allow, and how it ends."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from configs.model import ModelConfig
from minimax_jax.checkpoint.folder import read_config
from minimax_jax.loaded import find
from serving import __main__ as command
from serving.command.flags import parse
from serving.command.listeners import for_gateway, reaches_gateway
from serving.command.resolve import Machine, default_name, is_merged, resolve, serving_config
from serving.command.run import check_http

CPU = Machine(platform="cpu", num_devices=1)
GPUS = Machine(platform="gpu", num_devices=4)


def resolved(line: str, machine: Machine = CPU):
    return resolve(parse(line.split()), machine)


def test_limits_are_the_models_and_the_machines_unless_they_are_given():
    config = resolved("tiny").config
    assert (config.max_model_len, config.block_size) == (2048, 16)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (16, 512)
    on_gpus = resolved("tiny", GPUS).config
    assert (on_gpus.max_num_seqs, on_gpus.max_num_batched_tokens) == (256, 8192)
    given = resolved("tiny --max-num-seqs 3 --max-model-len 1k --max-logprobs 5").config
    assert (given.max_num_seqs, given.max_model_len, given.max_logprobs) == (3, 1000, 5)


def test_a_step_holds_a_token_of_every_sequence_that_was_asked_for():
    config = resolved("tiny --max-num-seqs 900").config
    assert config.max_num_batched_tokens == 900
    line = "tiny --max-num-seqs 100 --speculative-config.num_speculative_tokens 7"
    config = serving_config(parse(line.split()), read_config(find("tiny")), CPU)
    assert (config.num_speculative_tokens, config.max_num_batched_tokens) == (7, 800)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        # F193: the block size is that of the checkpoint's sparse attention.
        ("tiny --block-size 128", "block_size=128 is not the model's sparse block size, 16"),
        ("tiny --block-size 0", "block_size=0 is not at least 1"),
        # F194: limits that no pool holds, with the largest that one does.
        (
            "tiny --num-gpu-blocks-override 64",
            "max_model_len=2048 needs 128 blocks, but num_gpu_blocks_override says 64: the largest "
            "max_model_len is 1024",
        ),
        ("tiny --max-model-len 1M", "max_model_len=1048576 is more than the model's 2048"),
        ("tiny --max-num-seqs 1024 --max-num-batched-tokens 512", "is less than one token and"),
        ("tiny --max-num-seqs many", "max_num_seqs='many' is not of type int"),
        ("tiny -tp 4", "tp4 needs 4 devices, and JAX sees 1 (cpu)"),
        ("tiny -tp 2 --enable-expert-parallel", "tp2,ep needs 2 devices, and JAX sees 1 (cpu)"),
        ("tiny --quantization-config.moe mxfp8", "`minimax-jax convert SRC DST --format mxfp8`"),
        ("tiny --speculation-costs none.json", "says what drafts cost, and nothing speculates"),
        (
            "tiny --speculative-config.method dspark --speculation-costs none.json",
            "none.json",
        ),
        ("tiny --speculative-config.num_speculative_tokens 9", "more than the drafter's 7"),
        ("nothing-of-this-name", "neither a bundled model (tiny) nor a folder"),
        ("tiny --revision main", "'tiny' is not a hub name, so it has no revision"),
    ],
)
def test_what_this_model_or_machine_cannot_do_is_one_sentence_before_any_weight(line, sentence):
    with pytest.raises(ValueError) as error:
        resolved(line)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_layouts_are_taken_where_their_devices_are():
    with pytest.raises(ValueError, match="tp=3 neither divides the 4 key/value heads nor"):
        resolved("tiny -tp 3", GPUS)
    for flags, layout in (
        ("-tp 2 -dp 2 -ep", "dp2,tp2,ep"),
        ("-tp 4 -dcp 2", "tp4,dcp2"),
        ("-tp 4 --attention-config.indexer_decode_cp true", "tp4,dcp4"),
    ):
        assert str(resolved(f"tiny {flags}", GPUS).asked.parallel) == layout


def test_ranks_that_share_out_pages_own_wider_blocks():
    assert resolved("tiny --parallel tp4,dcp4,split", GPUS).config.block_size == 64
    with pytest.raises(ValueError, match="block size, 16, times the 4 ranks that share out pages"):
        resolved("tiny --parallel tp4,dcp4,split --block-size 16", GPUS)


def test_no_process_may_be_left_without_work():
    two = replace(GPUS, num_processes=2)
    with pytest.raises(ValueError, match="tp2 uses 2 of the 4 devices of 2 processes"):
        resolved("tiny -tp 2", two)
    assert resolved("tiny -tp 4", two).asked.parallel.num_devices == 4


def test_the_experts_format_that_the_checkpoint_has_is_fine():
    assert resolved("tiny --quantization-config.moe nvfp4").asked.experts == "nvfp4"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("tiny", "tiny"),
        ("MiniMaxAI/MiniMax-M3.1-Flash", "m3.1-flash"),
        ("/models/minimax-m3/", "m3"),
        ("MiniMax", "model"),
    ],
)
def test_the_default_name_is_the_models_without_what_the_gateway_merges(model, name):
    assert default_name(model) == name
    assert not is_merged(name)


def test_names_that_are_merged_are_served_and_said():
    it = resolved("tiny --served-model-name MiniMax-M3 other")
    assert (it.name, it.aliases) == ("MiniMax-M3", ("other",))
    [line] = it.lines
    assert "--served-model-name MiniMax-M3" in line and "80 characters" in line


def test_an_adapter_may_not_take_the_models_name(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="--lora tiny is a name that the model itself has"):
        resolved(f"tiny --lora tiny={tmp_path}")


def test_the_gateway_has_its_own_door_where_the_open_one_asks_for_a_key():
    open_one = parse(["tiny"]).server
    assert reaches_gateway(open_one) and reaches_gateway(replace(open_one, host="0.0.0.0"))
    for change in ({"api_key": "k"}, {"host": "192.0.2.1"}, {"host": "::1"}):
        closed = replace(open_one, max_concurrent_requests=7, **change)
        assert not reaches_gateway(closed)
        inner = for_gateway(closed)
        assert reaches_gateway(inner) and inner.max_concurrent_requests == 7


def test_http_that_cannot_be_is_refused_before_loading(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("serving.command.run.check_installed", lambda: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}: "):
            check_http(resolved(f"tiny --http {port}"))
        check_http(resolved("tiny --no-http"))
    with pytest.raises(ValueError, match="HTTP needs a tokenizer, and tiny has none: --no-http"):
        check_http(replace(resolved("tiny --http 0"), folder=tmp_path))
    with pytest.raises(ValueError, match="--chat-template nowhere.jinja is no file"):
        check_http(resolved("tiny --http 0 --chat-template nowhere.jinja"))
    with pytest.raises(ValueError, match="the gateway asks no client for a certificate"):
        check_http(
            resolved("tiny --http 0 --ssl-certfile c --ssl-keyfile k --ssl-ca-certs a"),
        )


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--port 5", "the following arguments are required: MODEL"),
        ("tiny --port x", "port='x' is not of type int"),
        ("tiny --block-size 64", "block_size=64"),
        ("tiny --prot 5", "do you mean --port?"),
    ],
)
def test_a_mistake_is_one_sentence_and_code_2(line, text, capsys):
    with pytest.raises(SystemExit) as error:
        command.main(line.split())
    said = capsys.readouterr().err
    assert error.value.code == 2
    assert said.startswith("minimax-serve: ") and said.count("\n") == 1 and text in said


def test_the_help_names_every_group(capsys):
    with pytest.raises(SystemExit) as error:
        command.main(["--help"])
    assert error.value.code == 0
    said = capsys.readouterr().out
    for text in ("--max-model-len", "--http", "--metrics-port", "--attention-config", "--lora"):
        assert text in said


def test_the_shape_of_a_model_is_enough_to_resolve():
    assert isinstance(resolved("tiny").model, ModelConfig)
