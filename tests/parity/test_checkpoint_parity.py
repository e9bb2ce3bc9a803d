"""What transformers saves, we load: names, config and logits, with random weights in float32."""

import jax
import numpy as np
import pytest

from minimax_jax.batch import pack
from minimax_jax.cache import pool_layout
from minimax_jax.checkpoint import load_model, save_model
from minimax_jax.checkpoint.folder import read_config
from minimax_jax.convert import convert
from pallas_kernels.layouts.pool import CacheFormats
from tests.checkpoint import files
from tests.numerics import assert_close

torch = pytest.importorskip("torch")
m3 = pytest.importorskip("transformers.models.minimax_m3_vl")
pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("default"),  # other projects' warnings are not ours to fix
]
TOKENS = 61
# Sparse attention in all layers but the first, or in all; both with a dense MLP in the first.
PATTERNS = {"m3": [0, 1, 1], "m3.1": [1, 1, 1]}


def text_config(sparse: list[int]) -> dict:
    """Specification 6's tiny config: with blocks of 16, two of them chosen."""
    return dict(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=32,
        dense_intermediate_size=96,
        shared_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        rotary_dim=8,
        partial_rotary_factor=0.5,
        rope_theta=5e6,
        num_local_experts=8,
        num_experts_per_tok=4,
        routed_scaling_factor=2.0,
        moe_layer_freq=[0, 1, 1],
        hidden_act="swigluoai",
        bos_token_id=1,
        eos_token_id=2,
        sparse_attention_config=dict(
            use_sparse_attention=True,
            sparse_index_dim=16,
            sparse_num_index_heads=4,
            sparse_topk_blocks=2,
            sparse_block_size=16,
            sparse_score_type="max",
            sparse_init_block=0,
            sparse_local_block=1,
            sparse_attention_freq=sparse,
            sparse_disable_index_value=sparse,
        ),
    )


def text_only(sparse: list[int]):
    return m3.MiniMaxM3VLForCausalLM(m3.MiniMaxM3VLTextConfig(**text_config(sparse)))


def with_vision(sparse: list[int]):
    vision = dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        patch_size=14,
    )
    config = m3.MiniMaxM3VLConfig(
        text_config=text_config(sparse),
        vision_config=vision,
        projector_hidden_size=64,
        image_token_index=7,
        video_token_index=8,
    )
    return m3.MiniMaxM3SparseForConditionalGeneration(config)


def random_weights(model, seed: int):
    """Norms and biases are zero at first, which would test little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "rotary" in name or "inv_freq" in name:
                continue
            spread = 0.1 if name.endswith("bias") else 0.3 if value.ndim == 1 else 0.15
            value.copy_(torch.randn(value.shape, generator=generator) * spread)
    model.config._attn_implementation = "eager"
    return model.eval()


def our_logits(folder, tokens: np.ndarray) -> np.ndarray:
    model, _ = load_model(folder, dtype="float32")
    layout = pool_layout(model.config, CacheFormats(kv="f32", index="f32"))
    batch, places = pack(tokens, np.zeros(len(tokens), int), layout.block_size)
    logits = jax.jit(lambda m, b: m.logits(m.hidden(b, layout)[0]))(model, batch)
    return np.asarray(logits).reshape(-1, logits.shape[-1])[places]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("make", [text_only, with_vision])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_save_pretrained_writes_has_the_same_logits_here(pattern, make, seed, tmp_path):
    theirs = random_weights(make(PATTERNS[pattern]), seed)
    tokens = np.random.default_rng(seed).integers(9, 512, TOKENS)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)[None]).logits[0].numpy()
    theirs.save_pretrained(tmp_path / "theirs")
    assert np.abs(expected).max() > 1
    assert_close(our_logits(tmp_path / "theirs", tokens), expected, "f32_logits")
    assert [int(x) for x in read_config(tmp_path / "theirs").sparse_layers] == PATTERNS[pattern]


def test_the_vision_class_saves_the_released_names(tmp_path):
    """Specification 3.1, and what we write of it again."""
    theirs = random_weights(with_vision(PATTERNS["m3"]), 0)
    theirs.save_pretrained(tmp_path / "theirs")
    model, report = load_model(tmp_path / "theirs", dtype="float32")
    save_model(model, tmp_path / "ours", source=tmp_path / "theirs")
    ours = files.headers(tmp_path / "ours")
    assert ours == files.headers(tmp_path / "theirs")
    vision = {name for name in ours if not name.startswith("language_model.")}
    assert len(vision) == report.not_loaded["vision"]
    text = set(ours) - vision
    assert text == set(files.released(read_config(tmp_path / "theirs"))[0])
    for name in vision:
        kept = files.read_tensor(tmp_path / "ours", name)
        assert kept == files.read_tensor(tmp_path / "theirs", name)


@pytest.mark.parametrize("sharded", [False, True])
def test_transformers_loads_what_we_write(sharded, tmp_path):
    theirs = random_weights(with_vision(PATTERNS["m3.1"]), 2)
    tokens = np.random.default_rng(2).integers(9, 512, TOKENS)
    theirs.save_pretrained(tmp_path / "theirs")
    size = 200_000 if sharded else 10**9
    options = {"source": tmp_path / "theirs", "max_shard_bytes": size}
    save_model(load_model(tmp_path / "theirs", dtype="float32")[0], tmp_path / "ours", **options)
    back = m3.MiniMaxM3SparseForConditionalGeneration.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        ids = torch.from_numpy(tokens)[None]
        assert torch.equal(back(ids).logits, theirs(ids).logits)


def test_a_bf16_conversion_is_read_by_transformers_with_equal_weights(tmp_path):
    theirs = random_weights(with_vision(PATTERNS["m3"]), 3)
    theirs.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", format="bf16", layers=[0, 2])
    back = m3.MiniMaxM3SparseForConditionalGeneration.from_pretrained(
        tmp_path / "ours", dtype=torch.float32
    )
    wanted, found = theirs.state_dict(), back.state_dict()
    for name, value in found.items():
        source = wanted[name.replace("language_model.layers.1.", "language_model.layers.2.")]
        exact = "vision" in name or "projector" in name or ".mlp.gate." in name
        rounded = source if exact else source.to(torch.bfloat16).to(torch.float32)
        assert torch.equal(value, rounded), name
