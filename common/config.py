"""A Llama's shape, read from the `config.json` of a Hugging Face folder.

Only what the forward pass needs, in one frozen dataclass. Both spellings that are found in the wild are read: the
rotary embedding under `rope_theta` and `rope_scaling` (transformers 4) or under `rope_parameters` (transformers 5), the
dtype under `torch_dtype` or `dtype`. What would silently change the maths is refused: another architecture, another
activation, an unknown rope type. Changes in no milestone.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.architecture import check_architecture
from common.errors import ModelError, shown

_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
ROPE_TYPES = {  # and what each of them may have beside it
    "default": _ROPE_KEYS,
    "linear": (*_ROPE_KEYS, "factor"),
    "llama3": (*_ROPE_KEYS, "factor", "low_freq_factor", "high_freq_factor"),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: `theta` is the base of the frequencies, the rest scales them (see `llama.rope_inv_freq`)."""

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama; sizes are counts of elements.

    `dtype` is what the checkpoint was stored in; `--dtype auto` goes by the device instead (`loading.select_dtype`).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    dtype: str

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V that one token needs over all layers; times the dtype's size it is bytes.

        It counts KV heads, not heads: with grouped-query attention several heads read the same K and V.
        """
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Read `config.json` and, for its end tokens, `generation_config.json`.

        Raises:
            ModelError: a file is missing or damaged, or describes what this engine does not compute.
        """
        config = _read_json(folder / "config.json")
        generation_file = folder / "generation_config.json"
        generation = _read_json(generation_file) if generation_file.exists() else {}
        try:
            end_ids = _as_ids(generation.get("eos_token_id"))
        except ValueError as error:
            raise ModelError(f"{generation_file} holds a value that cannot be: {error}.") from None
        try:
            check_architecture(config, folder)
            return cls._from_json(config, end_ids)
        except KeyError as error:
            raise ModelError(f"{folder / 'config.json'} has no {error}: the checkpoint is incomplete.") from None
        except ModelError:
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"{folder / 'config.json'} holds a value that cannot be: {error}.") from None

    @classmethod
    def _from_json(cls, config: dict[str, Any], end_ids: list[int]) -> "ModelConfig":
        hidden_size, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        num_kv_heads = _size(config, "num_key_value_heads", num_heads)
        # Not always hidden_size / num_heads: some checkpoints say otherwise, some say null.
        head_dim = _size(config, "head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise ModelError(f"config.json has {num_heads} heads, not a multiple of its {num_kv_heads} KV heads.")
        if head_dim < 1 or head_dim % 2:
            raise ModelError(f"config.json has a head_dim of {head_dim}, but rotary embedding needs pairs.")
        # Both files may list end tokens, and neither list is complete in every checkpoint: all of them count.
        eos = dict.fromkeys([*end_ids, *_as_ids(config.get("eos_token_id"))])
        return cls(
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            num_layers=_size(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=_size(config, "max_position_embeddings", 2048),  # the format's own default
            rms_norm_eps=_positive(config, "rms_norm_eps", 1e-6),
            rope=_rope(config),
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            attention_bias=_flag(config, "attention_bias"),
            mlp_bias=_flag(config, "mlp_bias"),
            eos_token_ids=tuple(eos),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{file.parent} has no {file.name}: a model folder needs config.json, *.safetensors and tokenizer.json."
        ) from None
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8; thousands of digits in a number, or of brackets
        reason = str(error).partition(";")[0]
        raise ModelError(f"{file} is not valid JSON ({reason}): download it again.") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file} does not hold a JSON object: download it again.")
    return content


def _rope(config: dict[str, Any]) -> RopeConfig:
    """Merge the two spellings: v5's `rope_parameters` holds theta and scaling, v4 keeps them apart.

    Where both are there, transformers takes `rope_scaling` and forgets the other; here they must say the same.
    """
    given = {name: config[name] for name in ("rope_scaling", "rope_parameters") if config.get(name)}
    ropes = {name: _rope_parameters(config, name, dict(values)) for name, values in given.items()}
    if len(set(ropes.values())) > 1:
        raise ModelError(
            f"config.json has rope_scaling {shown(config['rope_scaling'])} and rope_parameters "
            f"{shown(config['rope_parameters'])}, which contradict each other: keep the one that the model was trained "
            "with."
        )
    return next(iter(ropes.values())) if ropes else _rope_parameters(config, "rope_parameters", {})


def _rope_parameters(config: dict[str, Any], where: str, parameters: dict[str, Any]) -> RopeConfig:
    """One spelling; what it leaves out stands beside it, as in transformers."""
    rope_type = parameters.get("rope_type") or parameters.get("type")
    if rope_type is None and "factor" in parameters:
        raise ModelError(
            f"config.json scales the rotary embedding without saying how: its {where} has a factor, but no rope type."
        )
    rope_type = rope_type or "default"
    if rope_type not in ROPE_TYPES:
        raise ModelError(
            f"config.json asks for the rope type {shown(rope_type)} in {where}; this engine computes "
            f"{', '.join(ROPE_TYPES)} only, and plain positions in its place would give wrong text: choose another "
            "model."
        )
    if parameters.get("type", rope_type) not in (None, rope_type):
        raise ModelError(
            f"config.json has the rope_type {shown(rope_type)} and the type {shown(parameters['type'])} in {where}."
        )
    if (parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError(
            "config.json asks for a partial rotary embedding (partial_rotary_factor), which this engine does not "
            "compute."
        )
    for name, value in parameters.items():
        if name not in ROPE_TYPES[rope_type] and value not in (None, 1):
            raise ModelError(
                f"config.json has {name} = {shown(value)} in {where}, which means nothing for the rope type "
                f"{rope_type!r}, or nothing that this engine computes: choose another model."
            )
    theta = _positive(parameters, "rope_theta", _positive(config, "rope_theta", 10000.0))
    if rope_type == "default":
        return RopeConfig(theta)
    if rope_type == "linear":
        return RopeConfig(theta, rope_type, _positive(parameters, "factor"))
    low, high = _positive(parameters, "low_freq_factor"), _positive(parameters, "high_freq_factor")
    if low >= high:
        raise ModelError(f"config.json has a low_freq_factor of {low}, not below its high_freq_factor of {high}.")
    original = "original_max_position_embeddings"  # beside the rest it comes first, as in transformers
    original_len = _size(parameters if config.get(original) is None else config, original)
    return RopeConfig(theta, rope_type, _positive(parameters, "factor"), low, high, original_len)


def _size(values: dict[str, Any], name: str, default: int | None = None) -> int:
    """A whole number above zero; absent or null is the default, and without one a `KeyError`."""
    value = values.get(name)
    if value is None and default is not None:
        return default
    if type(values[name]) is not int or values[name] < 1:
        raise ValueError(f"{name} is {values[name]!r}")
    return values[name]


def _positive(values: dict[str, Any], name: str, default: float | None = None) -> float:
    """A finite number above zero; absent or null is the default, and without one a `KeyError`."""
    value = values.get(name)
    if value is None and default is not None:
        return default
    if type(values[name]) not in (int, float) or not 0 < values[name] < math.inf:
        raise ValueError(f"{name} is {values[name]!r}")
    return float(values[name])


def _flag(values: dict[str, Any], name: str) -> bool:
    """True or false; absent or null is false."""
    if values.get(name) not in (None, True, False):
        raise ValueError(f"{name} is {values[name]!r}")
    return bool(values.get(name))


def _as_ids(value: int | list[int] | None) -> list[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise ValueError(f"eos_token_id is {value!r}")
    return ids
