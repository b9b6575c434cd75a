"""The metadata of a Llama's `.gguf` file, as the `config.json` of a Hugging Face folder, and the tensors it asks for.

What changes the maths and has no field in Hugging Face's Llama is refused here, never dropped: another architecture,
experts, windows, an unknown rope scaling. Reads no weights but the few numbers of `rope_freqs.weight`. Changes in no
milestone.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from common.errors import ModelError, shown
from common.gguf.types import check_type

# The keys that are read, here or elsewhere, and those that change no logits. Any other key of `llama.*` may: experts,
# windows, scales, whatever is invented next. It is refused, unless its value says "unused".
_READ_KEYS = frozenset(
    f"llama.{name}"
    for name in (
        *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.causal", "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
        *("rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor"),
        *("rope.scaling.original_context_length", "rope.scaling.finetuned"),  # of YaRN, and for people
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
        "tensor_data_layout",  # the order of the rows of q and k, which is the same in all Llamas
    )
)
_UNUSED = {  # besides 0, false and what is empty
    "llama.rope.scaling.attn_factor": 1,
    "llama.rope.scaling.yarn_attn_factor": 1,
    "llama.rope.scaling.yarn_ext_factor": -1,
    "llama.logit_scale": 1,
    "llama.residual_scale": 1,
    "llama.embedding_scale": 1,
}
# llama.cpp's converter keeps only the factors that it computes from a checkpoint's llama3 rope scaling. All of Meta's
# releases have these three numbers in common, so that one unknown is left, and the factors tell whether it was so.
LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR, ORIGINAL_MAX_POSITION_EMBEDDINGS = 1.0, 4.0, 8192

_LAYER_MODULES = {  # GGUF's names inside a layer, and Hugging Face's
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Metadata(dict[str, Any]):
    """The file's keys and values; to ask for one that is missing is a `ModelError`, for the file is at fault."""

    def __missing__(self, key: str) -> Any:
        raise ModelError(f"its metadata has no {key}: the file is incomplete, choose another one.")


class Target(NamedTuple):
    """A tensor's name and shape in the folder; `num_rotary_heads` is not 0 where its rows change their order."""

    name: str
    shape: tuple[int, ...]
    num_rotary_heads: int = 0


def check_supported(metadata: Metadata) -> None:
    """Refuse what no part of this repository computes, before anything else is looked at.

    Raises:
        ModelError: it is one part of several, of another architecture, or has a feature beyond Hugging Face's Llama.
    """
    if check_type("split.count", metadata.get("split.count", 1)) > 1:
        raise ModelError(
            f"it is one of {metadata['split.count']} parts: merge them first, with llama.cpp's "
            "`llama-gguf-split --merge FIRST_PART OUTPUT`."
        )
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise ModelError(
            f"its architecture is {shown(architecture)}, and only 'llama' is supported (general.architecture): choose "
            "another model."
        )
    if metadata.get("general.type", "model") != "model":
        raise ModelError(f"it holds no model (general.type is {shown(metadata['general.type'])}): choose another file.")
    for key, value in metadata.items():
        check_type(key, value)
        is_used = value and value != _UNUSED.get(key)
        if key.startswith("llama.") and is_used and key not in _READ_KEYS:
            raise ModelError(f"it has {key} = {shown(value)}, which is not supported: choose another model.")
    if not metadata.get("llama.attention.causal", True):
        raise ModelError("it has llama.attention.causal = False, which is not supported: choose another model.")


def build_config(
    metadata: Metadata,
    shapes: dict[str, tuple[int, ...]],
    rope_factors: npt.NDArray[np.float32] | None,
) -> dict[str, Any]:
    """The content of `config.json`.

    Args:
        shapes: of every tensor in the file, by its GGUF name: they tell about biases and tied embeddings.
        rope_factors: `rope_freqs.weight`, of shape `[head_dim / 2]`, where the file has one.

    Raises:
        ModelError: a key is missing, or a value is not supported.
    """
    hidden_size, num_heads = metadata["llama.embedding_length"], _number_of_heads(metadata, "head_count")
    head_dim = metadata.get("llama.attention.key_length", hidden_size // num_heads)
    if head_dim < 1:
        raise ModelError(
            f"its llama.embedding_length is {hidden_size}, too little for {num_heads} heads "
            "(llama.attention.head_count): download it again."
        )
    num_kv_heads = _number_of_heads(metadata, "head_count_kv", default=num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelError(
            f"its {num_heads} heads of {head_dim} (llama.attention.head_count, key_length) must be a multiple of its "
            f"{num_kv_heads} KV heads (llama.attention.head_count_kv), and of an even size: download it again."
        )
    if metadata["llama.block_count"] > len(shapes):
        raise ModelError(
            f"its llama.block_count is {metadata['llama.block_count']}, but it has only {len(shapes)} tensors: "
            "download it again."
        )
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if metadata.get(key, head_dim) != head_dim:
            raise ModelError(
                f"it has {key} = {metadata[key]}, but only the head size ({head_dim}) is supported: "
                "choose another model."
            )
    rope_theta = _shortest(metadata.get("llama.rope.freq_base", 10000.0))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": metadata["llama.context_length"],
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": rope_theta,
        "rope_scaling": _rope_scaling(metadata, rope_factors, rope_theta, head_dim),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
    }


def tensor_targets(config: dict[str, Any]) -> dict[str, Target]:
    """Every tensor that the model of this `config.json` needs, by its GGUF name."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q_size, kv_size = num_heads * config["head_dim"], num_kv_heads * config["head_dim"]
    weights: dict[str, tuple[tuple[int, ...], int]] = {
        "attn_norm": ((hidden,), 0),
        "attn_q": ((q_size, hidden), num_heads),
        "attn_k": ((kv_size, hidden), num_kv_heads),
        "attn_v": ((kv_size, hidden), 0),
        "attn_output": ((hidden, q_size), 0),
        "ffn_norm": ((hidden,), 0),
        "ffn_gate": ((inner, hidden), 0),
        "ffn_up": ((inner, hidden), 0),
        "ffn_down": ((hidden, inner), 0),
    }
    targets = {"token_embd.weight": Target("model.embed_tokens.weight", (vocab, hidden))}
    for layer in range(config["num_hidden_layers"]):
        for name, (shape, num_rotary_heads) in weights.items():
            source, target = f"blk.{layer}.{name}", f"model.layers.{layer}.{_LAYER_MODULES[name]}"
            targets[f"{source}.weight"] = Target(f"{target}.weight", shape, num_rotary_heads)
            has_bias = config["attention_bias"] if name.startswith("attn") else config["mlp_bias"]
            if has_bias and not name.endswith("norm"):
                targets[f"{source}.bias"] = Target(f"{target}.bias", shape[:1], num_rotary_heads)
    targets["output_norm.weight"] = Target("model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        targets["output.weight"] = Target("lm_head.weight", (vocab, hidden))
    return targets


def llama3_rope_factors(factor: float, rope_theta: float, head_dim: int) -> npt.NDArray[np.float64]:
    """What llama3 rope scaling divides each frequency by, of shape `[head_dim / 2]` (Llama 3.1's `apply_scaling`).

    Short wavelengths stay, long ones are stretched by `factor`, those between go smoothly from one to the other.
    """
    wavelengths = 2 * math.pi * rope_theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = ORIGINAL_MAX_POSITION_EMBEDDINGS / wavelengths  # in the original context
    smooth = np.clip((turns - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR), 0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)


def _rope_scaling(
    metadata: Metadata, rope_factors: npt.NDArray[np.float32] | None, rope_theta: float, head_dim: int
) -> dict[str, Any] | None:
    # llama.cpp's own defaults: an unnamed type is linear, and no factor leaves the positions as they are.
    rope_type = metadata.get("llama.rope.scaling.type", "linear")
    factor = metadata.get("llama.rope.scaling.factor", metadata.get("llama.rope.scale_linear", 1.0))
    if rope_type not in ("none", "linear"):
        raise ModelError(
            f"its rope scaling (llama.rope.scaling.type) is {rope_type!r}, and only 'linear' and 'none' "
            "are supported: choose another model."
        )
    linear = rope_type == "linear" and factor not in (0.0, 1.0)
    if rope_factors is None:
        return {"rope_type": "linear", "factor": _shortest(factor)} if linear else None
    factor = _shortest(rope_factors.max())
    expected = llama3_rope_factors(factor, rope_theta, head_dim)
    if linear or rope_factors.shape != expected.shape or not np.allclose(rope_factors, expected, rtol=1e-4, atol=0):
        raise ModelError(
            "its rope factors (rope_freqs.weight) are not supported, as they are not those of Llama 3.1 for any "
            "factor: use the model's Hugging Face folder."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW_FREQ_FACTOR,
        "high_freq_factor": HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": ORIGINAL_MAX_POSITION_EMBEDDINGS,
    }


def _number_of_heads(metadata: Metadata, name: str, default: int | None = None) -> int:
    """One number, though the format allows one for each layer."""
    key = f"llama.attention.{name}"
    value = metadata[key] if default is None else metadata.get(key, default)
    numbers = set(value) if isinstance(value, list) else {value}
    if len(numbers) != 1:
        raise ModelError(f"its layers differ in {key}, which is not supported: choose another model.")
    return int(numbers.pop())


def _shortest(value: float) -> float:
    """The shortest number that is the same in float32: the file says 9.999999747378752e-06 for what was 1e-05."""
    return float(str(np.float32(value)))
