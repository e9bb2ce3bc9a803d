"""What is refused: damaged files, wrong tensors, layouts and conventions that we cannot read. All
of it is told together, in readable sentences, before any parameter is made.
"""

import json

import jax
import ml_dtypes
import numpy as np
import pytest

from minimax_jax import checkpoint
from minimax_jax.checkpoint.files import INDEX
from minimax_jax.checkpoint.tensor_file import CheckpointError
from tests.checkpoint import files
from tests.checkpoint.files import load

CONFIG = files.two_layers()
L = "language_model.model."
Q = f"{L}layers.0.self_attn.q_proj.weight"
W1 = f"{L}layers.1.block_sparse_moe.experts.3.w1.weight"


def problems(folder, monkeypatch=None) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    return caught.value.problems


def only_problem(folder) -> str:
    (problem,) = problems(folder)
    return problem


@pytest.fixture
def plain() -> files.Tensors:
    return files.released(CONFIG)[0]


@pytest.fixture
def m31() -> files.Tensors:
    return files.released(CONFIG, files.mxfp8, files.compressed_tensors)[0]


def test_a_shard_that_is_not_there_is_named(plain, tmp_path):
    """F01."""
    folder = files.write(tmp_path, CONFIG, plain, shards=2)
    shard = files.shard_name(1, 2)
    (folder / shard).unlink()
    count = len(plain) // 2
    wanted = f"{shard}: the index puts {count} tensors here; there is no such file"
    assert only_problem(folder) == wanted


def test_a_short_file_is_told_with_both_sizes(plain, tmp_path):
    """F03: never zeros."""
    folder = files.write(tmp_path, CONFIG, plain)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1024])
    wanted = (
        f"model.safetensors: expected {len(whole)} bytes by its header, "
        f"found {len(whole) - 1024} bytes"
    )
    assert only_problem(folder) == wanted
    path.write_bytes(whole + bytes(8))
    assert f"found {len(whole) + 8} bytes" in only_problem(folder)


def test_a_stray_file_beside_the_index_is_not_looked_at(plain, tmp_path):
    """F04."""
    folder = files.write(tmp_path, CONFIG, plain, shards=2)
    before = files.values_of(load(folder))
    others = {name: np.zeros_like(value) for name, value in plain.items()}
    files.write_tensors(folder / "model.safetensors", others)
    (folder / "notes.safetensors").write_bytes(b"no tensors")
    after = files.values_of(load(folder))
    for path, value in before.items():
        np.testing.assert_array_equal(after[path], value)


def test_index_and_headers_are_checked_both_ways(plain, tmp_path):
    """F05: three different sentences, all at once."""
    folder = files.write(tmp_path, CONFIG, plain, shards=2)
    index = files.read_index(folder)
    norm = f"{L}norm.weight"
    first, second = files.shard_name(0, 2), files.shard_name(1, 2)
    index[norm] = second if index[norm] == first else first  # not where the header has it
    left_out = index.pop(Q)  # in a header only
    index["x.weight"] = "model-00003-of-00003.safetensors"  # in no file at all
    del plain[f"{L}embed_tokens.weight"]
    files.write_index(folder, {k: v for k, v in index.items() if "embed_tokens" not in k})
    for shard in (first, second):
        kept = {
            n: plain[n] for n, f in files.read_index(folder).items() if f == shard and n in plain
        }
        kept |= {Q: plain[Q]} if shard == left_out else {}
        if shard != index[norm]:
            kept[norm] = plain[norm]
        else:
            kept.pop(norm, None)
        files.write_tensors(folder / shard, kept)
    found = problems(folder)
    assert f"{left_out}: {Q} is in the header, but not in the index" in found
    third = "model-00003-of-00003.safetensors"
    assert f"{third}: the index puts 1 tensors here; there is no such file" in found
    wanted = f"{index[norm]}: {norm} is put here by the index, but its header lacks it"
    assert wanted in found
    size = [CONFIG.vocab_size, CONFIG.hidden_size]
    assert f"{L}embed_tokens.weight {size} is neither in the index nor in any file" in found
    assert len(found) == 4


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop(Q), f"{Q} [256, 64] is neither in the index nor in any file"),
        (
            lambda t: t.update({f"{L}layers.7.norm.weight": np.ones(3, np.float32)}),
            f"model.safetensors: {L}layers.7.norm.weight (F32 [3]) is no tensor of this model",
        ),
        (
            lambda t: t.update({Q: t[Q][:-1]}),
            f"model.safetensors: {Q} is BF16 [255, 64], expected [256, 64] for "
            "layers.0.attention.q_proj.weight",
        ),
        (
            lambda t: t.update({Q: t[Q].view(np.int16)}),
            f"model.safetensors: {Q} has dtype I16 [256, 64], expected BF16, F16, F32, F8_E4M3 or "
            "packed U8",
        ),
        (
            lambda t: t.pop(W1),
            f"1 of the 8 tensors of layers.1.mlp.experts.w1.weight are neither in the index nor "
            f"in any file: {W1}",
        ),
        (
            lambda t: t.update({W1: t[W1].astype(ml_dtypes.float8_e4m3fn)}),
            f"model.safetensors: {W1}: its {W1}_scale_inv is neither in the index nor in any file",
        ),
        (
            lambda t: t.update({f"{Q}_scale_inv": np.ones((256, 2), np.uint8)}),
            f"model.safetensors: {Q} is BF16 [256, 64], but has scale_inv beside it",
        ),
        (
            lambda t: t.update({"model.norm.weight": t[f"{L}norm.weight"]}),
            "model.safetensors: model.norm.weight and model.safetensors: "
            f"{L}norm.weight are the same parameter",
        ),
    ],
    ids=["missing", "unknown", "shape", "dtype", "expert", "scale", "stray scale", "twice"],
)
def test_a_wrong_tensor_is_named_with_its_file(change, sentence, plain, tmp_path):
    change(plain)
    found = problems(files.write(tmp_path, CONFIG, plain))
    assert sentence in found or sentence in {_swapped(p) for p in found}
    assert len(found) == 1


def _swapped(problem: str) -> str:
    """'a and b are ...' in the other order."""
    one, is_pair, rest = problem.partition(" and ")
    other, _, end = rest.partition(" are ")
    return f"{other} and {one} are {end}" if is_pair else problem


@pytest.mark.parametrize(
    ("suffix", "value", "sentence"),
    [
        ("_scale", np.ones((32, 3), ml_dtypes.float8_e4m3fn), "F8_E4M3 [32, 3], expected [32, 4]"),
        ("_scale", np.ones((32, 4), np.uint8), "U8 [32, 4], expected [32, 4]"),
        ("_packed", np.ones((32, 64), np.uint8), "U8 [32, 64], expected [32, 32]"),
        ("_global_scale", np.ones(2, np.float32), "F32 [2], expected 1 F32"),
        ("_global_scale", np.ones(1, np.float16), "F16 [1], expected 1 F32"),
    ],
)
def test_a_wrong_part_of_an_nvfp4_matrix_is_named(suffix, value, sentence, m31, tmp_path):
    m31[W1 + suffix] = value
    assert f"{W1}{suffix} is {sentence}" in only_problem(files.write(tmp_path, CONFIG, m31))


def test_everything_is_told_together_and_the_text_stays_short(plain, tmp_path):
    for name in [n for n in plain if "layers." in n]:
        plain[name.replace(L, f"{L}old.")] = plain.pop(name)
    folder = files.write(tmp_path, CONFIG, plain)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    lines = str(caught.value).splitlines()
    assert len(caught.value.problems) > 40
    assert len(lines) == 22 and lines[-1] == f"  and {len(caught.value.problems) - 20} more"
    assert lines[0] == f"cannot read the checkpoint {folder}:"


def test_nothing_is_made_before_everything_is_checked(plain, tmp_path, monkeypatch):
    del plain[f"{L}norm.weight"]
    folder = files.write(tmp_path, CONFIG, plain)
    before = len(jax.live_arrays())
    monkeypatch.setattr(checkpoint.Loader, "leaf", lambda *_: pytest.fail("a leaf was read"))
    problems(folder)
    assert len(jax.live_arrays()) == before


def test_the_convention_of_the_outer_scale_has_to_be_told(m31, tmp_path):
    """F87."""
    codes, outer = m31[f"{W1}_packed"], m31.pop(f"{W1}_global_scale")
    folder = files.write(tmp_path, CONFIG, m31)
    assert f"{W1}_packed is NVFP4 with no outer scale" in only_problem(folder)
    m31[f"{W1}_scale_2"] = outer
    assert "is NVFP4 with weight_scale_2" in only_problem(files.write(tmp_path, CONFIG, m31))
    m31[f"{W1}_global_scale"] = outer
    found = only_problem(files.write(tmp_path, CONFIG, m31))
    assert "is NVFP4 with weight_global_scale and weight_scale_2" in found
    del m31[f"{W1}_packed"], m31[f"{W1}_scale_2"]
    m31[W1] = codes
    found = only_problem(files.write(tmp_path, CONFIG, m31))
    assert "is NVFP4 with weight_global_scale: only weight_packed with weight_global_scale" in found


def test_experts_of_one_layer_have_one_form(m31, tmp_path):
    for suffix in ("_packed", "_scale", "_global_scale"):
        del m31[W1 + suffix]
    m31[W1] = np.ones((32, 64), np.float32)
    assert "is stored in several forms" in only_problem(files.write(tmp_path, CONFIG, m31))


@pytest.mark.parametrize("name", [f"{L}embed_tokens.weight"])
def test_what_has_to_be_plain_is_not_taken_quantised(name, plain, tmp_path):
    stored, _ = files.mxfp8(name, plain[name].shape, np.random.default_rng(0))
    found = only_problem(files.write(tmp_path, CONFIG, plain | stored))
    assert found.endswith("is stored as mxfp8, but embedding has to be plain")


def test_another_layout_of_experts_is_one_line(plain, tmp_path):
    """F10: no dump of hundreds of names."""
    stacks: dict[str, list[np.ndarray]] = {}
    for name in [n for n in plain if ".experts." in n]:
        before, _, after = name.partition("experts.")
        w = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}[after.split(".")[1]]
        stacks.setdefault(f"{before}switch_mlp.{w}.weight", []).append(plain.pop(name))
    plain |= {name: np.stack(parts) for name, parts in stacks.items()}
    found = only_problem(files.write(tmp_path, CONFIG, plain))
    assert found.startswith(
        f"the experts are stored as {L}layers.{{i}}.block_sparse_moe.switch_mlp.down_proj.weight"
    )
    assert "(3 tensors): this layout is not supported" in found


def test_a_fused_tensor_of_a_wrong_shape_names_both_that_it_holds(plain, tmp_path):
    """F11."""
    mlp = f"{L}layers.0.mlp."
    for half in ("gate", "up"):
        del plain[f"{mlp}{half}_proj.weight"]
    plain[f"{mlp}gate_up_proj.weight"] = np.ones((200, 64), np.float32)
    found = problems(files.write(tmp_path, CONFIG, plain))
    assert found == tuple(
        f"model.safetensors: {mlp}gate_up_proj.weight is F32 [200, 64], expected [256, 64] for "
        f"layers.0.mlp.{half}_proj.weight"
        for half in ("gate", "up")
    )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            f"{Q}_scale_inv",
            f"MXFP8 scale model.safetensors: {Q}_scale_inv [7, 1] is NaN (byte 255)",
        ),
        (f"{W1}_scale", f"NVFP4 scale model.safetensors: {W1}_scale [7, 1] is NaN (byte 0xff)"),
        (
            f"{W1}_global_scale",
            f"NVFP4 outer scale model.safetensors: {W1}_global_scale [0] is nan",
        ),
    ],
)
def test_nan_among_the_scales_is_refused_with_its_place(name, sentence, m31, tmp_path):
    if name.endswith("global_scale"):
        m31[name] = np.full(1, np.nan, np.float32)
    else:
        m31[name].view(np.uint8)[7, 1] = 0xFF
    assert sentence in only_problem(files.write(tmp_path, CONFIG, m31))


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        (
            {"quantized_layers": {"model.layers.9.self_attn.q_proj": {"quant_algo": "MXFP8"}}},
            "'model.layers.9.self_attn.q_proj' of the quantization config matches no tensor",
        ),
        (
            {"quantized_layers": {"*.experts.*": {"quant_algo": "NVFP4"}, "*.o_prj": "MXFP8"}},
            "'*.o_prj' of the quantization config matches no tensor",
        ),
        (
            {"quantized_layers": {f"{L}layers.0.self_attn": {"quant_algo": "W4A16_AWQ"}}},
            f"the quantization config gives '{L}layers.0.self_attn' the unknown format 'W4A16_AWQ'",
        ),
        (
            {"quantized_layers": {Q.removesuffix(".weight"): {"quant_algo": "NVFP4"}}},
            "layers.0.self_attn.q_proj is stored as mxfp8, but the quantization config says NVFP4 "
            f"by '{Q.removesuffix('.weight')}'",
        ),
        (
            {"config_groups": {"g": {"targets": ["re:.*w9$"], "format": "nvfp4-pack-quantized"}}},
            "'re:.*w9$' of the quantization config matches no tensor",
        ),
        (
            {"ignored_layers": ["lm_head", "layers.0.self_attn.q_proj", "vision_tower"]},
            "layers.0.self_attn.q_proj is stored as mxfp8, but the quantization config excludes it "
            "by 'layers.0.self_attn.q_proj'",
        ),
    ],
    ids=["no such layer", "no such glob", "unknown", "other form", "expression", "excluded"],
)
def test_a_quantisation_config_at_odds_with_the_tensors_is_refused(
    section, sentence, m31, tmp_path
):
    """F07: an unmatched pattern is an error, not bf16."""
    folder = files.write(tmp_path, CONFIG, m31, quantization={"quant_method": "mxfp8"} | section)
    assert only_problem(folder) == sentence


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_nothing_is_unpickled(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    found = only_problem(tmp_path)
    assert found == f"{name} would have to be unpickled; only safetensors files are read"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("config.json", None, "there is no config.json"),
        ("config.json", b"{", "config.json is not JSON: "),
        ("config.json", b"[1]", "config.json is not a JSON object"),
        ("model.safetensors", None, f"there is neither {INDEX} nor model.safetensors"),
        ("model.safetensors", b"", "model.safetensors: no safetensors file: 0 bytes"),
        ("model.safetensors", b"x" * 64, "model.safetensors: no safetensors file: 64 bytes"),
        ("model.safetensors", b"\x02" + bytes(7) + b"[]", "its header is not a JSON object"),
        ("model.safetensors", b"\x02" + bytes(7) + b"{]", "its header is not JSON"),
        ("model.safetensors", b"\x02" + bytes(7) + b"{}", "its files hold no tensors"),
        (INDEX, b"{}", f"{INDEX} has no weight_map"),
        (INDEX, b'{"weight_map": {"x": "../x.safetensors"}}', "names '../x.safetensors', which is"),
        (INDEX, b'{"weight_map": {"x": "x.bin"}}', "names 'x.bin', which is no safetensors file"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_sentence(name, content, sentence, plain, tmp_path):
    folder = files.write(tmp_path, CONFIG, plain)
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_bytes(content)
    assert sentence in only_problem(folder)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}, "the header describes x as"),
        ({"dtype": "F32", "shape": [2]}, "the header describes x as"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "the header gives x 8 bytes"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]}, "the header gives x -8 bytes"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}, "x starts at byte"),
    ],
)
def test_a_header_that_does_not_add_up_is_refused(entry, sentence, plain, tmp_path):
    folder = files.write(tmp_path, CONFIG, plain)
    header = json.dumps({"x": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(12)
    (folder / "model.safetensors").write_bytes(content)
    assert any(sentence in problem for problem in problems(folder))


def test_a_missing_folder_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="there is no config.json"):
        load(tmp_path / "nowhere")
