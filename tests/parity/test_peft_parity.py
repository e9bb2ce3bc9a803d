"""A trained adapter's files in PEFT: it finds a place for every matrix, and transformers' model
gives our logits with it.
"""

import copy
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from minimax_jax.checkpoint import load_model
from minimax_jax.loaded import LoadedModel, logits
from minimax_jax.lora import low_rank
from minimax_jax.peft import CONFIG, MATRICES, PREFIX, read_adapter
from pallas_kernels.layouts.pool import CacheFormats
from rl.adapters import new_adapter
from rl.peft_files import write_adapter
from tests.parity.transformers_models import random_reference, text_config
from tests.rl.grpo_toy import shaken

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.parity
# How the files' names begin, and those of transformers' text model.
RELEASED, TRANSFORMERS = "language_model.model.", "model."
RANK, ALPHA = 4, 8.0


@pytest.fixture(scope="module")
def reference():
    return random_reference(text_config("small", "m3.1"), 0)


@pytest.fixture(scope="module")
def loaded(reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    reference.save_pretrained(folder)
    model, _ = load_model(folder, dtype=np.float32)
    return LoadedModel(model=model, formats=CacheFormats(kv="f32", index="f32"), folder=folder)


def written(loaded, expert_lora, folder):
    parameters = shaken(new_adapter(loaded.config, expert_lora, RANK, jax.random.key(0)))
    write_adapter(parameters, loaded.config, "base", rank=RANK, alpha=ALPHA, folder=folder)
    return load_file(folder / MATRICES)


def skeleton(matrices):
    """Linears of a released model, and nothing else."""
    root = torch.nn.Module()
    for name, a in matrices.items():
        if not name.endswith(".lora_A.weight"):
            continue
        *parents, last = name.removeprefix(PREFIX).removesuffix(".lora_A.weight").split(".")
        b, parent = matrices[name.replace("lora_A", "lora_B")], root
        for part in parents:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        parent.add_module(last, torch.nn.Linear(a.shape[1], b.shape[0], bias=False))
    return root


def test_peft_has_a_place_for_every_matrix_and_the_same_meaning(loaded, tmp_path):
    matrices = written(loaded, "per_expert", tmp_path)
    model = peft.PeftModel(skeleton(matrices), peft.PeftConfig.from_pretrained(tmp_path))
    found = model.load_adapter(str(tmp_path), "default")
    assert not found.unexpected_keys
    assert not any("lora" in name for name in found.missing_keys)
    name = "language_model.model.layers.1.block_sparse_moe.experts.3.w2"
    theirs = model.base_model.model.get_submodule(name)
    x = np.random.default_rng(0).normal(size=(5, theirs.in_features)).astype(np.float32)
    with torch.no_grad():
        added = (theirs(torch.tensor(x)) - theirs.base_layer(torch.tensor(x))).numpy()
    adapter = read_adapter(tmp_path, loaded.model)
    assert adapter is not None
    experts = adapter["layers"]["1"]["mlp"]["experts"]["w2"]
    ours = low_rank(jnp.asarray(x), jax.tree.map(lambda matrix: matrix[3], experts))
    np.testing.assert_allclose(ours, added, atol=1e-5)


# peft asks transformers for what transformers has since renamed
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_transformers_gives_our_logits_with_it(loaded, reference, tmp_path):
    """With the attention's matrices: of experts and MLPs transformers fuses gate and up."""
    matrices = written(loaded, "none", tmp_path)
    kept = {name: x for name, x in matrices.items() if ".self_attn." in name}
    save_file(kept, tmp_path / MATRICES)
    adapted = replace(loaded, adapter=read_adapter(tmp_path, loaded.model))
    renamed = {name.replace(RELEASED, TRANSFORMERS): x for name, x in kept.items()}
    save_file(renamed, tmp_path / MATRICES)
    path = tmp_path / CONFIG
    described = json.loads(path.read_text("utf-8"))
    # in full: there the indexer's projections are called as the attention's are
    modules = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in renamed}
    path.write_text(json.dumps({**described, "target_modules": sorted(modules)}), "utf-8")
    ids = np.random.default_rng(1).integers(0, 512, 200)
    model = peft.PeftModel.from_pretrained(copy.deepcopy(reference), str(tmp_path))
    with torch.no_grad():
        theirs = model(torch.tensor(ids[None])).logits[0].numpy()
    assert np.abs(theirs - logits(loaded, ids)).max() > 0.1
    np.testing.assert_allclose(logits(adapted, ids), theirs, atol=1e-3)
