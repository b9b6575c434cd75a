"""What kind of value each key of a `.gguf` file must have: the format lets any key have any.

Changes in no milestone.
"""

import math
from collections.abc import Callable
from typing import Any

from common.errors import ModelError, shown


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 1


def _is_size_of_each_layer(value: object) -> bool:
    return _is_size(value) or (isinstance(value, list) and bool(value) and all(map(_is_size, value)))


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf  # type: ignore[operator]


def _is_factor(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(item) in (int, float) and math.isfinite(item) for item in value)


_SIZES = (
    *("split.count", "llama.context_length", "llama.embedding_length", "llama.block_count"),
    *("llama.feed_forward_length", "llama.attention.key_length", "llama.attention.value_length"),
    "llama.rope.dimension_count",
)
_TEXTS = (
    *("general.architecture", "llama.rope.scaling.type"),
    *("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template"),
)
_FLAGS = (
    *("llama.attention.causal", "tokenizer.ggml.add_space_prefix"),
    *("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"),
)
_Kind = tuple[str, Callable[[object], bool]]
_KIND_OF: dict[str, _Kind] = {
    **dict.fromkeys(_SIZES, ("a whole number above 0", _is_size)),
    **dict.fromkeys(_TEXTS, ("a text", _is_text)),
    **dict.fromkeys(_FLAGS, ("true or false", _is_flag)),
    "llama.attention.head_count": ("a whole number above 0, or one for each layer", _is_size_of_each_layer),
    "llama.attention.head_count_kv": ("a whole number above 0, or one for each layer", _is_size_of_each_layer),
    "llama.attention.layer_norm_rms_epsilon": ("a number above 0", _is_positive),
    "llama.rope.freq_base": ("a number above 0", _is_positive),
    "llama.rope.scaling.factor": ("a number of at least 0", _is_factor),
    "llama.rope.scale_linear": ("a number of at least 0", _is_factor),
    "tokenizer.ggml.tokens": ("a list of texts", _are_texts),
    "tokenizer.ggml.merges": ("a list of texts", _are_texts),
    "tokenizer.ggml.scores": ("a list of numbers", _are_numbers),
    "tokenizer.ggml.token_type": ("a list of whole numbers", _are_counts),
}
_TOKEN_ID: _Kind = ("a token id", _is_count)


def check_type(key: str, value: Any) -> Any:
    """The value, if it is of the kind that its key asks for; a key that is not known here may have any.

    Raises:
        ModelError: it is of another kind, or out of its range.
    """
    is_token_id = key.startswith("tokenizer.ggml.") and key.endswith("_token_id")
    kind, is_right = _TOKEN_ID if is_token_id else _KIND_OF.get(key, ("", lambda _: True))
    if not is_right(value):
        raise ModelError(f"its {key} is {shown(value)}, which is not {kind}: download it again.")
    return value
