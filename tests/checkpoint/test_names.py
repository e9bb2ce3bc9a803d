"""Names of checkpoints and paths of the model, both ways."""

from dataclasses import replace

import pytest

from configs.presets import m3, m3_1_flash, tiny_random
from minimax_jax import names
from minimax_jax.checkpoint import abstract_model, parameters_of
from tests.checkpoint import files


@pytest.mark.parametrize("config", [m3(), m3_1_flash()], ids=["m3", "m3.1"])
def test_the_full_models_have_as_many_tensors_as_the_released_ones(config):
    """Specification 3.1: 23,416 in M3, with the vision tower's. Counted layer by kind of layer."""

    def tensors(layers: list[int]) -> int:
        sparse, moe = (
            [kind[i] for i in layers] for kind in (config.sparse_layers, config.moe_layers)
        )
        cut = replace(config, sparse_layers=tuple(sparse), moe_layers=tuple(moe), drafter=None)
        parameters = parameters_of(abstract_model(cut, "bfloat16"))
        return sum(
            len(names.released_place(path).names(p.get_value().shape[0]))
            for path, p in parameters.items()
        )

    first, both = tensors([0]), tensors([0, 3])
    beside_layers = 3  # embedding, norm, head
    count = beside_layers + 3 * (first - beside_layers) + 57 * (both - first)
    vision = 1 + 2 + 32 * (4 + 8 + 4) + 8
    # M3.1's layers 0-2 have an indexer as well: two projections and two norms each
    assert count == 23416 - vision + (12 if all(config.sparse_layers) else 0)


def test_released_names_are_those_of_the_specification():
    config = tiny_random()
    parameters = parameters_of(abstract_model(config, "float32"))
    ours = {
        names.add_prefix(name)
        for path, p in parameters.items()
        for name in names.released_place(path).names(p.get_value().shape[0])
    }
    assert ours == set(files.released(config)[0])


def test_every_place_leads_back_to_its_path():
    for path in parameters_of(abstract_model(tiny_random(), "float32")):
        for place in names.places(path):
            back = names.path_of(place.names(3)[-1])
            assert back is not None
            expert = 2 if place.layout == "per expert" else None
            same = path.replace("up_proj", "gate_proj").replace("w3", "w1")
            wanted = same if place.layout == "up half" else path  # a fused tensor is its gate's
            assert back == (wanted, expert)


@pytest.mark.parametrize("prefix", names.PREFIXES)
def test_prefixes_are_taken_off(prefix):
    assert names.strip_prefix(f"{prefix}layers.3.mlp.x") == "layers.3.mlp.x"


def test_the_head_is_beside_the_model():
    for name in ("lm_head.weight", "language_model.lm_head.weight"):
        assert names.strip_prefix(name) == "lm_head.weight"
    assert names.add_prefix("lm_head.weight") == "language_model.lm_head.weight"
    assert names.add_prefix("norm.weight") == "language_model.model.norm.weight"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("vision_tower.vision_model.pre_layrnorm.weight", "vision"),
        ("model.vision_tower.layers.0.mlp.fc1.weight", "vision"),
        ("multi_modal_projector.linear_1.bias", "vision"),
        ("patch_merge_mlp.linear_1.bias", "vision"),
        ("language_model.model.mtp.layers.0.eh_proj.weight", "mtp"),
        ("model.mtp.layers.0.enorm.weight", "mtp"),
        ("language_model.model.dspark.fc.weight", "dspark"),
        ("model.dspark.fc.weight", "dspark"),
        ("language_model.model.layers.3.x.experts.0.w2.input_global_scale", "activation scale"),
        ("language_model.model.layers.3.self_attn.q_proj.input_scale", "activation scale"),
        ("language_model.model.layers.3.self_attn.k_proj.k_scale", "cache scale"),
        ("language_model.model.layers.3.self_attn.q_proj.weight_scale", None),
        ("language_model.model.layers.3.self_attn.q_proj.weight", None),
        ("language_model.model.norm.weight", None),
    ],
)
def test_what_is_known_and_not_loaded(name, part):
    assert names.known_part(name) == part


def test_layers_are_renumbered_in_names_and_paths():
    name = "language_model.model.layers.13.block_sparse_moe.experts.7.w1.weight"
    assert names.layer_number(name) == 13
    assert names.with_layer(name, 2) == name.replace("layers.13", "layers.2")
    assert names.layer_number("vision_tower.vision_model.encoder.layers.3.mlp.fc1.bias") is None
    assert names.with_layer("layers.13.mlp.router.bias", 4) == "layers.4.mlp.router.bias"
