"""load: the drafter of a folder, its cache format, and folders whose drafter is of another kind."""

import json
import shutil

import pytest

import minimax_jax
from configs.speculative import SpeculativeConfig
from minimax_jax.loaded import ASSETS
from minimax_jax.speculative.calibration import Calibration, write_calibration


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(ASSETS / "tiny", tmp_path / "model")
    return tmp_path / "model"


def test_a_model_that_does_not_speculate_has_no_drafter_and_no_pages_for_it():
    loaded = minimax_jax.load("tiny")
    assert loaded.drafter is None and loaded.speculation is None
    assert loaded.config.drafter is None and loaded.layout.draft_layers == 0


def test_the_drafter_is_loaded_and_its_cache_is_fp8():
    loaded = minimax_jax.load("tiny", speculative=True)
    assert loaded.drafter is not None and loaded.speculation is not None
    assert loaded.config.drafter == loaded.drafter.config
    assert loaded.formats.draft == "fp8" and loaded.speculation.num_drafts == 7
    assert loaded.layout.draft_layers == 2
    assert loaded.layout.draft_part.formats.kv == "fp8"


def test_the_draft_cache_and_the_number_of_drafts_can_be_chosen():
    config = SpeculativeConfig(num_speculative_tokens=3, kv_cache_dtype="auto")
    loaded = minimax_jax.load("tiny", speculative=config)
    assert loaded.speculation is not None and loaded.speculation.num_drafts == 3
    assert (loaded.formats.draft, loaded.formats.kv) == ("f32", "nvfp4")


def test_the_calibration_of_the_folder_is_read(folder):
    calibration = Calibration(temperatures=(1.0, 1.5, 2.0, 1.0, 1.0, 1.0, 0.5))
    write_calibration(folder / "dspark", calibration)
    loaded = minimax_jax.load(folder, speculative=True)
    assert loaded.speculation is not None and loaded.speculation.calibration == calibration


def test_a_drafter_of_another_kind_is_refused_only_when_it_is_to_speculate(folder):
    path = folder / "dspark" / "config.json"
    root = json.loads(path.read_text())
    root["text_config"]["dspark_markov_head_type"] = "rnn"
    path.write_text(json.dumps(root))
    assert minimax_jax.load(folder).drafter is None
    with pytest.raises(ValueError, match="dspark_markov_head_type='rnn'"):
        minimax_jax.load(folder, speculative=True)


def test_a_folder_without_a_drafter_cannot_speculate(folder):
    shutil.rmtree(folder / "dspark")
    with pytest.raises(ValueError, match="has no dspark/config.json"):
        minimax_jax.load(folder, speculative=True)


def test_more_drafts_than_there_are_are_refused_before_any_weight_is_read(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="num_speculative_tokens=9 is more than the drafter's 7"):
        minimax_jax.load(folder, speculative=SpeculativeConfig(num_speculative_tokens=9))


def test_the_bundled_drafter_is_calibrated():
    speculation = minimax_jax.load("tiny", speculative=True).speculation
    assert speculation is not None
    calibration = speculation.calibration
    assert calibration.num_steps > 1000 and len(calibration.temperatures) == 7
    assert calibration.error is not None and calibration.raw_error is not None
    assert max(calibration.error) < 0.06 < max(calibration.raw_error)
