"""What fits where, against numbers worked out by hand from the shapes (spec/serving 7)."""

import json
from dataclasses import replace

import jax
import pytest
from flax import nnx

from configs.parallel import ParallelConfig
from configs.parts import QuantizationConfig
from configs.presets import m3, m3_1_flash, tiny, tiny_random
from minimax_jax.__main__ import main
from minimax_jax.cache import pool_layout
from minimax_jax.capacity import Capacity, Question, as_the_reference, capacity
from minimax_jax.capacity.gpus import GB, GPUS
from minimax_jax.capacity.weights import weight_parts
from minimax_jax.checkpoint import parameters_of
from minimax_jax.model import Model
from minimax_jax.quantize import form_of, is_router, quantize_model
from pallas_kernels.layouts.pool import CacheFormats
from tests.model.models import small

CONTEXT = 262144
ONE, BF16 = ParallelConfig(), QuantizationConfig()


@pytest.fixture(autouse=True)
def _no_compilation_cache(monkeypatch):
    """Nothing is compiled here, and the other tests of this process keep their own cache."""
    monkeypatch.setattr("minimax_jax.__main__.keep_compiled_programs", lambda: None)


def ask(parallel: str = "dep4", config=None, **changes) -> Capacity:
    """M3.1-Flash on four B300s at 262,144 tokens, NVFP4 caches, an FP8 draft."""
    question = Question(
        config=m3_1_flash() if config is None else config,
        parallel=ParallelConfig.parse(parallel),
        formats=changes.pop("formats", CacheFormats(kv="nvfp4", index="nvfp4", draft="fp8")),
        memory_bytes=changes.pop("memory_bytes", GPUS["b300"]),
        context=changes.pop("context", CONTEXT),
    )
    return capacity(replace(question, **changes))


def run(capsys, *arguments: str) -> str:
    main(("capacity", *arguments))
    return capsys.readouterr().out


# ---- pages


@pytest.mark.parametrize(
    ("form", "kv", "index"),
    [("nvfp4", 34_560, 4_320), ("fp8", 61_440, 7_680), ("bf16", 122_880, 15_360)],
)
def test_bytes_a_token_of_sixty_layers(form, kv, index):
    keys, indexed, drafter = ask(formats=CacheFormats(kv=form, index=form, draft="fp8")).stages
    assert (keys.token_bytes, indexed.token_bytes) == (kv, index)
    assert drafter.token_bytes == 5 * 2 * 4 * 128  # five layers' K and V in FP8
    assert keys.sequence_bytes == kv * CONTEXT
    assert indexed.sequence_bytes == (kv + index) * CONTEXT


def test_everything_held_is_a_row_of_the_pool():
    answer = ask("tp4,ep")
    layout = pool_layout(m3_1_flash(), answer.question.formats, local_heads=1)
    assert answer.held.block_bytes == layout.block_bytes == 14_240 * 128


def test_tensor_parallel_ranks_split_heads_and_copy_index_keys():
    keys, indexed, _ = ask("tp4,ep").stages
    assert (keys.token_bytes, indexed.token_bytes) == (8_640, 4_320)
    # more ranks than heads hold copies of a head
    assert ask("tp8").stages[0].token_bytes == 8_640


def test_dense_layers_have_no_index_and_m3_no_drafter():
    keys, indexed = ask(config=m3()).stages
    assert indexed.token_bytes == 57 * 72
    (alone,) = ask(config=replace(m3(), sparse_layers=(False,) * 60)).stages
    assert alone.name == keys.name and alone.block_bytes == keys.block_bytes


def test_a_sequence_takes_whole_blocks():
    block = ask(context=1).held.sequence_bytes
    assert block == ask(context=128).held.sequence_bytes == ask().held.block_bytes
    assert ask(context=129).held.sequence_bytes == 2 * block


# ---- weights


def by_part(parallel: str, weights=None) -> dict[str, tuple[int, int]]:
    parts = weight_parts(m3_1_flash(), ParallelConfig.parse(parallel), weights)
    return {part.part: (part.total_bytes, part.gpu_bytes) for part in parts}


EXPERTS = 57 * 128 * 3 * 6144 * 3072  # weights of the routed experts
OUTER = 57 * 128 * 3 * 4  # bytes: an NVFP4 outer scale for each matrix
EMBEDDING = 200_064 * 6144 * 2
ATTENTION = 60 * (2 * 8192 + 2 * 512) * 6144 * 33 // 32  # MXFP8: a byte, and one for each 32


def test_data_and_expert_parallel_weights():
    parts = by_part("dep4")
    assert parts["routed experts"] == ((nvfp4 := EXPERTS * 9 // 16 + OUTER), nvfp4 // 4)
    for name, nbytes in [
        ("attention projections", ATTENTION),
        ("index projections", 60 * (512 + 128) * 6144 * 33 // 32),
        ("dense MLP", 3 * 3 * 12288 * 6144 * 33 // 32),
        ("shared expert", 57 * 3 * 3072 * 6144 * 33 // 32),
        ("embedding", EMBEDDING),
        ("head", EMBEDDING),
    ]:
        assert parts[name] == (nbytes, nbytes), name
    router = 57 * (128 * 6144 + 128) * 4  # float32; every rank routes its own tokens
    assert parts["router"] == (router, router)


def test_the_drafter_is_its_own_part():
    layer = (2 * 8192 + 2 * 512 + 3 * 12288) * 6144 * 33 // 32 + 2 * (2 * 6144 + 2 * 128)
    fused, markov = 2 * 6144 * 5 * 6144, 2 * 2 * 200_064 * 256
    nbytes = 5 * layer + fused + markov + 2 * (6400 + 1) + 2 * 2 * 6144
    assert by_part("dep4")["drafter"] == (nbytes, nbytes)


def test_tensor_parallel_weights():
    parts = by_part("tp4")
    assert parts["attention projections"] == (ATTENTION, ATTENTION // 4)
    assert parts["embedding"] == (EMBEDDING, EMBEDDING // 4)
    of_heads, shared = 60 * 512 * 6144 * 33 // 32, 60 * 128 * 6144 * 33 // 32
    assert parts["index projections"] == (of_heads + shared, of_heads // 4 + shared)
    # each rank has a slice of every expert, and so every outer scale
    assert parts["routed experts"][1] == EXPERTS * 9 // 16 // 4 + OUTER


def test_formats_of_weights():
    assert by_part("dep4", "m3.1") == by_part("dep4")
    mxfp8, bf16 = by_part("dep4", "mxfp8"), by_part("dep4", "bf16")
    assert mxfp8["routed experts"][0] == EXPERTS * 33 // 32
    assert bf16["routed experts"][0] == EXPERTS * 2
    assert mxfp8["attention projections"][0] == ATTENTION
    assert bf16["attention projections"][0] == ATTENTION * 32 // 33 * 2


# spec/model 3.1: the patch embedding, the first norm, 32 layers, projector and merger
LAYER = 4 * (1280 * 1280 + 1280) + (2 * 5120 * 1280 + 5120 + 1280) + 4 * 1280
PROJECTOR = 6144 * 1280 + 6144 * 6144 + 2 * 6144 + 6144 * 24576 + 6144 * 6144 + 2 * 6144
VISION = 1280 * 3 * 2 * 14 * 14 + 2 * 1280 + 32 * LAYER + PROJECTOR


def test_the_published_m3_has_as_many_parameters():
    """427,040,140,160 parameters (spec/model 3.1), vision among them."""
    parts = weight_parts(m3(), ONE, "bf16")
    router = 57 * (128 * 6144 + 128)  # four bytes each
    count = (sum(part.total_bytes for part in parts) - 2 * router) // 2
    assert count == 427_040_140_160 - VISION


def test_one_layer_a_kind_counts_as_all_of_them():
    """The sum over every leaf of a whole model, quantised as a load would hold it."""
    config = small(4)
    model = jax.eval_shape(lambda: quantize_model(Model(config, nnx.Rngs(0)), "m3.1"))
    held = 0
    for path, parameter in parameters_of(model).items():
        weight = parameter.get_value()
        plain = 4 if is_router(path) else 2  # bytes; float32 in this model, whatever the format
        sizes = [leaf.dtype.itemsize for leaf in jax.tree.leaves(weight)]
        sizes = [plain] if form_of(weight) == "plain" else sizes
        held += sum(n * leaf.size for n, leaf in zip(sizes, jax.tree.leaves(weight), strict=True))
    parts = weight_parts(config, ONE, "m3.1")
    assert sum(part.total_bytes for part in parts) == held
    assert all(part.total_bytes == part.gpu_bytes for part in parts)


# ---- what fits


def test_the_published_counts_under_their_assumptions():
    question = ask().question
    nvfp4, fp8 = (as_the_reference(question, form) for form in ("nvfp4", "fp8"))
    assert (nvfp4.total_sequences, fp8.total_sequences) == (76, 28)
    assert (nvfp4.sequences, fp8.sequences) == (19, 7)
    # one usable memory has to give both: 270 GB x 0.92 does, plain 288 GB x 0.92 does not
    low, high = max(nvfp4.same_from, fp8.same_from), min(nvfp4.same_below, fp8.same_below)
    assert low <= 0.92 * 270e9 < high <= 0.92 * 288e9
    assert nvfp4.weight_bytes / 1e9 == pytest.approx(74.1, abs=0.1)
    assert fp8.weight_bytes / 1e9 == pytest.approx(122.5, abs=0.1)


def test_the_published_assumptions_are_reached_by_flags():
    asked = ask(memory_bytes=270 * GB, utilization=0.92).stages
    assert [stage.total_sequences for stage in asked] == [76, 68, 56]


def test_the_answer_is_the_same_within_its_window_and_another_outside():
    stage = ask().held

    def sequences(usable: int) -> int:
        return ask(memory_bytes=usable, utilization=1.0).held.sequences

    assert stage.sequences == sequences(stage.same_from) == sequences(stage.same_below - 1)
    assert sequences(stage.same_from - 1) == stage.sequences - 1
    assert sequences(stage.same_below) == stage.sequences + 1


def test_overhead_and_utilization_take_from_what_is_usable():
    question = ask(utilization=0.5, overhead_bytes=10 * GB).question
    assert question.usable_bytes == 134 * GB
    assert ask(overhead_bytes=20 * GB).held.sequences < ask().held.sequences


def test_which_limit_binds():
    assert ask().held.limit == "memory"
    capped = ask(max_num_seqs=3).held
    assert (capped.limit, capped.total_sequences, capped.same_below) == ("max_num_seqs", 12, None)
    assert ask(max_num_seqs=1000).held.limit == "memory"
    heavy = ask(memory_bytes=GPUS["h100"]).held
    assert (heavy.limit, heavy.sequences, heavy.num_blocks, heavy.same_from) == ("weights", 0, 0, 0)
    # pages of shorter sequences fit where the longest does not
    short = ask(memory_bytes=83 * GB, utilization=1.0, context=1048576).held
    assert (short.limit, short.sequences) == ("memory", 0) and short.num_blocks > 0


def test_shorter_sequences_fit_in_greater_number():
    counts = [ask(context=context).held.sequences for context in (1048576, CONTEXT, 4096)]
    assert counts == sorted(counts) and len(set(counts)) == 3


# ---- the command

ISSUE = ("--gpu", "b300", "--gpus", "4", "--parallel", "dep4", "--kv", "nvfp4")


def test_the_command_prints_bytes_weights_and_what_fits(capsys):
    out = run(capsys, *ISSUE, "--context", "262144")
    for row in ("routed experts", "attention projections", "embedding", "drafter", "a copy", "1/4"):
        assert row in out
    for number in ("34,560", "4,320", "index keys"):
        assert number in out
    text = " ".join(out.split())
    assert "Memory for pages binds" in text and "270 GB x 0.92" in text
    assert "76 with nvfp4 pages" in text and "28 with fp8 pages" in text


def test_json_holds_the_same_numbers(capsys):
    record = json.loads(run(capsys, *ISSUE, "--draft", "fp8", "--index", "fp8", "--json"))
    held = ask(formats=CacheFormats(kv="nvfp4", index="fp8", draft="fp8")).held
    assert record["sequences"] == held.total_sequences
    assert record["stages"][1]["token_bytes"] == 7_680
    assert record["reference"]["fp8"]["total_sequences"] == 28
    assert record["parallel"] == "dp4,ep" and record["num_gpus"] == 4


def test_other_cards_have_no_published_count(capsys):
    record = json.loads(run(capsys, "--memory", "270", "--parallel", "dep4", "--json"))
    assert record["reference"] == {} and record["memory_bytes"] == 270 * GB
    assert json.loads(run(capsys, "--gpu", "h200", "--gpus", "4", "--json"))["parallel"] == "tp4"


def test_a_checkpoint_is_asked_for_its_config_alone(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(replace(tiny(), quantization=BF16).to_hf()))
    asked = ("--gpu", "h100", "--model", str(tmp_path), "--context", "64", "--json")
    record = json.loads(run(capsys, *asked))
    assert [stage["format"] for stage in record["stages"]] == ["bf16", "bf16"]
    experts = next(part for part in record["weights"] if part["part"] == "routed experts")
    assert experts["total_bytes"] == 4 * 16 * 3 * 128 * 64 * 2


def test_the_plot_is_a_picture(capsys, tmp_path):
    run(capsys, *ISSUE, "--plot", str(tmp_path / "fits.png"))
    assert (tmp_path / "fits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu", "b400"], "GPU 'b400' is not one of h100, "),
        ([], "give --gpu or --memory"),
        (
            ["--gpu", "b300", "--gpus", "8", "--parallel", "dep4"],
            "'dep4' is for 4 GPUs, but gpus=8",
        ),
        (["--gpu", "b300", "--gpus", "0"], "gpus=0 is not at least 1"),
        (["--gpu", "b300", "--parallel", "pp4"], "'pp4' in 'pp4' is none of"),
        (["--gpu", "b300", "--parallel", "tp3"], "tp=3 neither divides the 4 key/value heads"),
        (["--gpu", "b300", "--parallel", "dep3"], "128 is not a multiple of its 3 shards"),
        (["--gpu", "b300", "--context", "2000000"], "context=2000000 is not in 1..1048576"),
        (["--gpu", "b300", "--context", "0"], "context=0 is not in 1.."),
        (["--gpu", "b300", "--kv", "int4"], "invalid choice: 'int4'"),
        (["--gpu", "b300", "--weights", "int4"], "invalid choice: 'int4'"),
        (["--gpu", "b300", "--utilization", "1.5"], "utilization=1.5 is not in (0, 1]"),
        (["--gpu", "b300", "--memory", "inf"], "inf GB is not a finite number"),
        (["--gpu", "b300", "--overhead", "-1"], "is negative"),
        (["--gpu", "b300", "--max-num-seqs", "0"], "max_num_seqs=0 is not at least 1"),
        (["--gpu", "b300", "--model", "nosuch"], "'nosuch' is neither"),
        (["--gpu", "b300", "--plot", "fits.xyz"], "xyz"),
        (["--gpu", "h100", "--plot", "fits.png"], "no sequence of any length fits m3_1_flash on 1"),
    ],
)
def test_a_mistake_is_one_sentence(capsys, arguments, sentence):
    with pytest.raises(SystemExit) as stop:
        main(["capacity", *arguments])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert sentence in err.strip().splitlines()[-1]


def test_tiny_random_fits_anywhere():
    answer = ask("tp1", config=tiny_random(), context=8192)
    assert answer.held.limit == "memory" and answer.held.sequences > 1000
