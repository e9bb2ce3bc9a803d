"""load, find and save: names, formats, what is refused; and the bundled model itself."""

import json
import shutil
from dataclasses import replace

import huggingface_hub
import jax
import numpy as np
import pytest

import minimax_jax
from configs.parallel import ParallelConfig
from minimax_jax import checkpoint
from minimax_jax.loaded import ASSETS, find
from sharding import make_mesh
from tests.model.models import random_loaded, small, tokens


@pytest.fixture(scope="module")
def tiny():
    return minimax_jax.load("tiny")


def test_the_bundled_model_thinks_and_answers(tiny):
    chat = [{"role": "user", "content": "What is 47 + 38?"}]
    (answer,) = minimax_jax.generate(tiny, chat, max_tokens=48, temperature=0.0)
    assert (answer.text, answer.finish_reason) == ("85", "stop")
    assert answer.reasoning.startswith("47+38")


def test_the_bundled_model_is_small():
    assert sum(path.stat().st_size for path in (ASSETS / "tiny").iterdir()) <= 4 * 2**20


def test_cache_formats_come_from_the_checkpoint_and_can_be_chosen(tiny):
    assert (tiny.formats.kv, tiny.formats.index) == ("nvfp4", "nvfp4")
    chosen = minimax_jax.load("tiny", kv="bf16", index="fp8", compute="e4m3").formats
    assert (chosen.kv, chosen.index, chosen.compute) == ("bf16", "fp8", "e4m3")


def test_a_hub_name_is_fetched_at_its_revision(monkeypatch):
    asked = []

    def fetch(name, revision=None, allow_patterns=None):
        asked.append((name, revision, allow_patterns))
        return str(ASSETS / "tiny")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert find("owner/model", "v2") == ASSETS / "tiny"
    assert find("owner/model", files=["config.json"]) == ASSETS / "tiny"
    assert asked == [("owner/model", "v2", None), ("owner/model", None, ["config.json"])]


def test_an_unreachable_hub_is_one_sentence(monkeypatch):
    def fetch(name, revision=None, allow_patterns=None):
        raise OSError("no route\nmore lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(ValueError, match="'owner/model' could not be fetched .*: no route$"):
        find("owner/model")


def test_a_revision_of_something_that_has_none_is_refused():
    with pytest.raises(ValueError, match="'tiny' is not a hub name"):
        find("tiny", "main")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"kv": "int3"}, "'int3'"), ({"dtype": "float16"}, "float16"), ({"compute": "x"}, "'x'")],
)
def test_an_impossible_format_is_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        minimax_jax.load("tiny", **options)


@pytest.mark.devices(8)
@pytest.mark.parametrize("tp", [3, 6])
def test_ranks_that_cannot_share_heads_are_refused_before_any_weight_is_read(tp, monkeypatch):
    """F146."""
    monkeypatch.setattr(checkpoint, "load_model", None)
    with pytest.raises(ValueError, match=f"^tp={tp} neither divides the 4 key/value heads nor is"):
        minimax_jax.load("tiny", mesh=make_mesh(ParallelConfig(tp=tp)))


def test_a_template_inside_the_tokenizer_config_is_found(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(ASSETS / "tiny", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = (folder / "chat_template.jinja").read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink()
    assert minimax_jax.load(folder).template is not None


def test_what_is_saved_loads_to_the_same_logits(tiny, tmp_path):
    minimax_jax.save(tiny, tmp_path / "copy")
    copy = minimax_jax.load(tmp_path / "copy")
    ids = tokens(40)
    np.testing.assert_array_equal(minimax_jax.logits(copy, ids), minimax_jax.logits(tiny, ids))
    assert copy.template is not None and copy.tokenizer is not None


def test_a_model_with_an_adapter_is_not_saved_without_it(tmp_path):
    loaded = replace(random_loaded(small(1)), adapter={"head": None})
    with pytest.raises(ValueError, match="adapter"):
        minimax_jax.save(loaded, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [([], "at least one token"), ([1.5], "not token ids"), ([[1]], "not a pack"), ([900], "900")],
)
def test_scoring_refuses_what_are_no_tokens(tiny, ids, sentence):
    with pytest.raises(ValueError, match=sentence):
        minimax_jax.logits(tiny, np.asarray(ids, dtype=None if ids != [] else int))


@pytest.fixture
def config_alone(tmp_path):
    """A folder of tiny's without a weight."""
    for path in (ASSETS / "tiny").glob("*.json"):
        if "safetensors" not in path.name:
            shutil.copy(path, tmp_path)
    return tmp_path


def test_dummy_weights_need_a_config_alone(tiny, config_alone):
    loaded = minimax_jax.load(config_alone, load_format="dummy")
    weights = [jax.tree.leaves(one.model) for one in (loaded, tiny)]
    stored = [[(x.shape, x.dtype) for x in leaves] for leaves in weights]
    assert stored[0] == stored[1] and loaded.formats == tiny.formats


def test_load_formats_are_refused_before_anything_is_made(config_alone):
    with pytest.raises(ValueError, match="load_format='pt' is not one of auto, dummy"):
        minimax_jax.load(config_alone, load_format="pt")
    path = config_alone / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["moe_quant_algo"] = "BF16"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no random weights of mxfp8 projections and bf16 experts"):
        minimax_jax.load(config_alone, load_format="dummy")
