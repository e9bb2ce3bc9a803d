"""`dspark/config.json` <-> `DrafterConfig`, in the released file's keys (spec/dspark 1.1).

The file says much of it twice, in `text_config`, beside it, in `dflash_config` and in the target's
own `config.json`: all have to agree. What another drafter would do differently is refused, since it
would run and propose nonsense. What the file leaves out of sizes, rotary embedding and activation
is as in the target.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from configs import hf, hf_quantization
from configs.parts import DrafterConfig, WeightFormat, check

Json = Mapping[str, Any]
FILE = "dspark/config.json"
ARCHITECTURE = "DSparkMiniMaxDraftModel"
FIXED = {  # what other drafters vary and this code does not
    "dspark_markov_head_type": "vanilla",
    "confidence_head_with_markov": True,
    "sample_from_anchor": True,  # the anchor's row proposes too: 7 queries, 7 drafts
    "dspark_hybrid_context_fusion": False,
    "hybrid_context_fusion": False,
    "dspark_use_dense_ffn": True,
    "use_gemma_norm": True,
    "is_causal": False,
    "causal": False,
    "sparse_attention_config": None,
}
# Our field -> the keys that say it.
_KEYS = {
    "num_layers": ("num_hidden_layers",),
    "markov_rank": ("dspark_markov_rank",),
    "draft_block": ("dspark_block_size",),
    "noise_token": ("dspark_noise_token_id",),
    "target_layers": ("dspark_target_layer_ids", "target_layer_ids"),
    "window": ("sliding_window",),
}
_DENSE, _QUANTIZATION = "dense_intermediate_size", "quantization_config"
_OF_THE_TARGET = ("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id")
_OF_THE_TARGET += ("dspark_target_layer_ids",)


def read(root: Json, target_root: Json, target: Mapping[str, Any]) -> DrafterConfig:
    """The drafter of a target whose `config.json` is `target_root`, and whose `ModelConfig` fields
    are `target`.

    Raises ValueError with one sentence for a key that is missing, contradicts another, or asks for
    a drafter of another kind.
    """
    sections = [root.get("text_config"), root, root.get("dflash_config"), root.get("dspark_config")]
    sections = [section for section in sections if isinstance(section, Mapping)]
    _check_kind(root, sections, len(target["sparse_layers"]))
    target_text = target_root.get("text_config", target_root)
    shared = [{k: s[k] for k in _OF_THE_TARGET if k in s} for s in (target_root, target_text)]
    values = {field: _agreed([*sections, *shared], keys) for field, keys in _KEYS.items()}
    values["target_layers"] = tuple(values["target_layers"])
    text = _inherited(sections[0], target) | dict(sections[0])
    _check_sizes(text, target)
    _check_layers(text, values["num_layers"])
    width = "dspark_ffn_hidden_size" if "dspark_ffn_hidden_size" in text else _DENSE
    return DrafterConfig(
        **values,
        attention=hf.attention(text),
        mlp=hf.mlp(text, _agreed([text], (width,))),
        norm_eps=text["rms_norm_eps"],
        confidence_head=_has_confidence(sections),
        projections=_projections(root.get(_QUANTIZATION) or text.get(_QUANTIZATION)),
    )


def write(
    drafter: DrafterConfig, *, hidden_size: int, vocab_size: int, num_target_layers: int
) -> dict[str, Any]:
    """The file that `read` gives back for a target of these sizes."""
    a, layers, taps = drafter.attention, drafter.num_layers, list(drafter.target_layers)
    text = {
        "num_hidden_layers": layers,
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "rotary_dim": a.rotary_dim,
        "partial_rotary_factor": a.rotary_dim / a.head_dim,
        "rope_theta": a.rope_theta,
        "rms_norm_eps": drafter.norm_eps,
        "use_gemma_norm": True,
        "swiglu_alpha": drafter.mlp.alpha,
        "swiglu_limit": drafter.mlp.limit,
        "swiglu_beta": drafter.mlp.beta,
        "dense_intermediate_size": drafter.mlp.dense_dim,
        "dspark_ffn_hidden_size": drafter.mlp.dense_dim,
        "dspark_use_dense_ffn": True,
        "moe_layer_freq": [0] * layers,
        "sparse_attention_config": None,
        "layer_types": ["sliding_attention"] * layers,
        "sliding_window": drafter.window,
        "dspark_block_size": drafter.draft_block,
        "dspark_noise_token_id": drafter.noise_token,
        "dspark_target_layer_ids": taps,
        "dspark_markov_rank": drafter.markov_rank,
        "dspark_markov_head_type": "vanilla",
        "dspark_hybrid_context_fusion": False,
        "enable_confidence_head": drafter.confidence_head,
        "confidence_head_with_markov": drafter.confidence_head,
    }
    dflash = {"num_hidden_layers": layers, "num_target_layers": num_target_layers}
    root = {
        "architectures": [ARCHITECTURE],
        "text_config": text,
        "dflash_config": dflash | {"target_layer_ids": taps},
    }
    if drafter.projections == "mxfp8":
        root["quantization_config"] = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
    return root


def _check_kind(root: Json, sections: list[Json], num_target_layers: int) -> None:
    """Refuses drafters of another kind, and one for a target of another depth."""
    kinds = root.get("architectures") or [ARCHITECTURE]
    check(ARCHITECTURE in kinds, f"{FILE} is of {kinds[0]!r}: only {ARCHITECTURE} is supported")
    without = not _has_confidence(sections)
    for key, wanted in FIXED.items():
        for value in _said(sections, (key,)):
            unused = without and key == "confidence_head_with_markov"
            sentence = f"{key}={value!r} of {FILE} is not supported: this drafter has {wanted!r}"
            check(value == wanted or unused, sentence)
    for depth in _said(sections, ("num_target_layers",)):
        sentence = f"{FILE} is for a target of {depth} layers, this one has {num_target_layers}"
        check(depth == num_target_layers, sentence)


def _has_confidence(sections: list[Json]) -> bool:
    return False not in _said(sections, ("enable_confidence_head",))


def _agreed(sections: list[Json], keys: tuple[str, ...]) -> Any:
    """The one value that is said; ValueError if there is none, or another."""
    values = list(_said(sections, keys))
    check(bool(values), f"{FILE} has no {keys[0]}")
    for value in values:
        check(value == values[0], f"{keys[0]} is {values[0]} in one place and {value} in another")
    return values[0]


def _said(sections: list[Json], keys: tuple[str, ...]) -> Iterator[Any]:
    return (section[key] for section in sections for key in keys if key in section)


def _inherited(text: Json, target: Mapping[str, Any]) -> dict[str, Any]:
    """What the target says where the drafter's file is silent."""
    attention, mlp = target["attention"], target["mlp"]
    inherited = {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "rope_theta": attention.rope_theta,
        "rms_norm_eps": target["norm_eps"],
        "swiglu_alpha": mlp.alpha,
        "swiglu_limit": mlp.limit,
        "swiglu_beta": mlp.beta,
    }
    rotary = {"rotary_dim", "partial_rotary_factor", "rope_parameters"}
    return inherited if rotary & text.keys() else inherited | {"rotary_dim": attention.rotary_dim}


def _check_sizes(text: Json, target: Mapping[str, Any]) -> None:
    """The stream and the vocabulary are the target's, whose embedding and head are used."""
    for key in ("hidden_size", "vocab_size"):
        value = text.get(key, target[key])
        check(value == target[key], f"{key}={value} of {FILE} but the target has {target[key]}")
    rows = text.get("draft_vocab_size") or target["vocab_size"]
    sentence = f"draft_vocab_size={rows} of {FILE}: a reduced draft vocabulary is not supported"
    check(rows == target["vocab_size"], sentence)


def _check_layers(text: Json, num_layers: int) -> None:
    kinds = text.get("layer_types") or ["sliding_attention"] * num_layers
    slides = kinds == ["sliding_attention"] * num_layers
    check(slides, f"layer_types {kinds} of {FILE} are not {num_layers} of 'sliding_attention'")
    experts = text.get("moe_layer_freq") or 0
    dense = not any(experts) if isinstance(experts, list) else experts == 0
    check(dense, f"moe_layer_freq={experts} of {FILE} is not supported: its MLPs are dense")


def _projections(section: Json | None) -> WeightFormat:
    method = section.get("quant_method") if section else "mxfp8"
    check(method == "mxfp8", f"quant_method {method!r} of {FILE} is not supported: mxfp8 is")
    return hf_quantization.read(section).projections
