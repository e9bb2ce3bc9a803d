"""Adapters in PEFT's files, as the trees that steps take."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import minimax_jax
from minimax_jax.lora import LowRank
from minimax_jax.peft import read_adapter

BASE = "base_model.model.model.layers."
RANK, ALPHA = 2, 8
Q, EXPERT = f"{BASE}1.self_attn.q_proj", f"{BASE}2.block_sparse_moe.experts.3.w2"


@pytest.fixture(scope="module")
def tiny():
    return minimax_jax.load("tiny")


def matrices(module: str, out: int, width: int, rank: int = RANK) -> dict[str, np.ndarray]:
    random = np.random.default_rng(len(module))
    return {
        f"{module}.lora_A.weight": random.normal(size=(rank, width)).astype(np.float32),
        f"{module}.lora_B.weight": random.normal(size=(out, rank)).astype(np.float32),
    }


def folder(path: Path, tensors: dict[str, np.ndarray], **config) -> Path:
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"} | config
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(described))
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def test_matrices_stand_where_the_model_looks_for_them(tiny, tmp_path):
    given = matrices(Q, 256, 128) | matrices(EXPERT, 128, 64)
    adapter = read_adapter(folder(tmp_path / "a", given), tiny.model)
    assert adapter is not None
    q = adapter["layers"]["1"]["attention"]["q_proj"]
    assert isinstance(q, LowRank) and q.scale == ALPHA / RANK
    np.testing.assert_array_equal(q.a, given[f"{Q}.lora_A.weight"])
    np.testing.assert_array_equal(q.b, given[f"{Q}.lora_B.weight"])
    w2 = adapter["layers"]["2"]["mlp"]["experts"]["w2"]
    assert w2.a.shape == (16, RANK, 64) and w2.b.shape == (16, 128, RANK)
    np.testing.assert_array_equal(w2.a[3], given[f"{EXPERT}.lora_A.weight"])
    assert not np.any(w2.b[2])


def test_an_adapter_changes_the_logits_and_one_of_zeros_does_not(tiny, tmp_path):
    given = matrices(Q, 256, 128) | matrices(EXPERT, 128, 64)
    zeros = {name: np.zeros_like(x) for name, x in given.items()}
    ids = tiny.tokenizer.encode("What is 47 + 38?")

    def logits(tensors, name):
        adapter = read_adapter(folder(tmp_path / name, tensors), tiny.model)
        return np.asarray(minimax_jax.logits(replace(tiny, adapter=adapter), ids))

    plain = np.asarray(minimax_jax.logits(tiny, ids))
    real = np.isfinite(plain)  # padding ids are -inf
    np.testing.assert_array_equal(logits(zeros, "zeros"), plain)
    assert np.abs(logits(given, "given")[real] - plain[real]).max() > 0.01


def test_a_scale_by_the_root_of_the_rank(tiny, tmp_path):
    path = folder(tmp_path / "a", matrices(Q, 256, 128), use_rslora=True)
    adapter = read_adapter(path, tiny.model)
    assert adapter is not None
    assert adapter["layers"]["1"]["attention"]["q_proj"].scale == pytest.approx(ALPHA / 2**0.5)


@pytest.mark.parametrize(
    ("tensors", "config", "sentence"),
    [
        (matrices(Q, 256, 64), {}, "lora_A of layers.1.attention.q_proj is [2, 64], not [2, 128]"),
        (
            matrices(Q, 128, 128),
            {},
            "lora_B of layers.1.attention.q_proj is [128, 2], not [256, 2]",
        ),
        (matrices(f"{BASE}9.self_attn.q_proj", 256, 128), {}, "no part of this model"),
        (matrices(f"{BASE}1.self_attn.r_proj", 256, 128), {}, "no matrix of an adapter"),
        (matrices(f"{BASE}1.block_sparse_moe.gate", 16, 128), {}, "takes no adapter"),
        (matrices(f"{BASE}1.mlp.experts.gate_up_proj", 128, 128), {}, "no matrix of an adapter"),
        ({f"{Q}.lora_A.weight": np.zeros((2, 128), np.float32)}, {}, "q_proj is missing, not [256"),
        (matrices(Q, 256, 128), {"use_dora": True}, "use_dora=True is not supported"),
        (matrices(Q, 256, 128), {"peft_type": "IA3"}, "peft_type 'IA3' is not LORA"),
    ],
)
def test_what_is_no_adapter_of_this_model_is_refused(tiny, tmp_path, tensors, config, sentence):
    with pytest.raises(ValueError) as error:
        read_adapter(folder(tmp_path / "a", tensors, **config), tiny.model)
    assert sentence in str(error.value)


def test_a_folder_without_one_is_said(tiny, tmp_path):
    with pytest.raises(ValueError, match="expected a file adapter_config.json"):
        read_adapter(tmp_path, tiny.model)
