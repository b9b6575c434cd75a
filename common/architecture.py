"""Which `config.json` describes a Llama, and nothing besides that would change the maths.

A key that is dropped in silence gives fluent nonsense: what is not computed is refused here by its name. What is
computed is read by `config.py`. Changes in no milestone.
"""

from pathlib import Path
from typing import Any

from common.errors import ModelError, shown

SILU = ("silu", "swish")  # two names of one function
# Keys of Llamas' relatives that change the maths, and the value that changes nothing (beside null). transformers leaves
# them out of a model of type llama without a word; who wrote them there meant something by them.
UNUSED: dict[str, Any] = {
    "attention_multiplier": None,
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "logits_scaling": 1,
    "logit_scale": 1,
    "scale_emb": 1,
    "attention_factor": 1,
    "query_pre_attn_scalar": None,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "clip_qkv": 0,
    "sliding_window": 0,
    "attention_chunk_size": 0,
    "qk_layernorm": False,
    "use_qk_norm": False,
    "alibi": False,
    "is_causal": True,
    "use_bidirectional_attention": False,
    "parallel_attn": False,
    "use_parallel_residual": False,
    "rope_interleaved": False,
    "rotary_pct": 1,
    "no_rope_layers": [],
    "num_local_experts": 0,
    "num_experts": 0,
    "hidden_activation": "silu",
}


def check_architecture(config: dict[str, Any], folder: Path) -> None:
    """Refuse the `config.json` of a model that is no Llama, or one with something added that is not computed here.

    Raises:
        ModelError: it names the folder, or the file and its key.
    """
    found = config.get("model_type")
    names = ", ".join(map(str, config.get("architectures") or []))
    if found is None:
        raise ModelError(
            f"{folder} holds a model of no named type: its config.json has no model_type, which must be llama for this "
            "engine to serve it."
        )
    if found != "llama":
        raise ModelError(
            f"{folder} holds a {found!s:.80} model{f' ({names})' if names else ''}, but this engine serves "
            "Llama models (model_type llama) only: choose another model."
        )
    if config.get("hidden_act", "silu") not in SILU:
        raise ModelError(
            f"{folder} uses the activation {shown(config['hidden_act'])} (hidden_act in its config.json); this engine "
            "computes only 'silu'."
        )
    for key in ("quantization_config", "compression_config", "quantization"):
        if config.get(key):
            method = config[key].get("quant_method", key) if isinstance(config[key], dict) else config[key]
            raise ModelError(
                f"{folder} is quantised ({method!s:.80}), which is not supported: choose the unquantised model."
            )
    unused: dict[str, Any] = UNUSED
    if config.get("use_sliding_window") is False:
        unused = UNUSED | {"sliding_window": config.get("sliding_window")}
    for key, value in unused.items():
        if config.get(key) not in (None, value):
            raise ModelError(
                f"{folder / 'config.json'} has {key} = {shown(config[key])}, which this engine does not compute, and "
                "the text would be wrong without it: choose another model."
            )
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ModelError(
            f"{folder / 'config.json'} has layer_types other than full_attention, which this engine does not compute: "
            "choose another model."
        )
