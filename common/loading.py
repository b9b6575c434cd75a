"""A model ready to serve: weights and tokenizer from a name, on a device, in a dtype. Changes in no milestone."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from common.config import ModelConfig
from common.dummy import dummy_tokenizer, dummy_weights
from common.errors import ModelError
from common.llama import Llama, Model
from common.tokenizer import Tokenizer
from common.weights import load_weights, resolve

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOAD_FORMATS = ("auto", "dummy")


def load(
    model: str | Path | Model | None,
    tokenizer: Tokenizer | None,
    *,
    device: str,
    dtype: str,
    load_format: str = "auto",
    make: Callable[[ModelConfig, dict[str, Tensor]], Model] = Llama.packed,
) -> tuple[Model, Tokenizer]:
    """Load what `model` names, or take it as it is.

    Args:
        model: see `weights.resolve`; or a ready model, which needs a `tokenizer` and keeps its device and dtype.
        tokenizer: replaces the one in the model's folder.
        device: see `select_device`.
        dtype: see `select_dtype`.
        load_format: `auto` reads the checkpoint. `dummy` reads its `config.json` and, where there is one, its
            tokenizer, and makes random weights: for measurements, as a step takes as long whatever the numbers are.
        make: from plain weights, as `load_weights` returns them, to a model.

    Raises:
        ModelError: the model cannot be loaded, or not as asked.
    """
    if model is None or isinstance(model, str | Path):
        torch_device = select_device(device)
        torch_dtype = select_dtype(dtype, torch_device)
        if load_format not in LOAD_FORMATS:
            raise ModelError(f"There is no load format {load_format!r}: choose {' or '.join(LOAD_FORMATS)}.")
        folder = resolve(model, with_weights=load_format == "auto")
        config = ModelConfig.from_folder(folder)
        if load_format == "dummy":
            model = make(config, dummy_weights(config, torch_device, torch_dtype))
            tokenizer = tokenizer or dummy_tokenizer(folder, config)
        else:
            model = make(config, load_weights(folder, config, torch_device, torch_dtype))
            tokenizer = tokenizer or Tokenizer.from_folder(folder)
    if not hasattr(model, "forward"):
        raise ModelError(f"model must be a name, a path, or a model, got {model!r:.80}.")
    if tokenizer is None:
        raise ModelError("A ready model needs its tokenizer: pass tokenizer=... as well.")
    return model, tokenizer


def select_device(name: str) -> torch.device:
    """`auto` is CUDA where there is a GPU, else the CPU; raises `ModelError` for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ModelError(f"There is no device {name!r}: choose auto, cpu or cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("This PyTorch finds no CUDA device: use --device cpu, or install a CUDA build of torch.")
    return torch.device(name)


def select_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on a CPU and bfloat16 on CUDA.

    float32, because in it tokens can be equal from milestone to milestone; some CPUs decode 16-bit numbers faster, on
    others they are slow. Not float16: a checkpoint trained in bfloat16 has activations beyond float16's 65,504, which
    become infinite and garble the text. bfloat16 has float32's range.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ModelError(f"There is no dtype {name!r}: choose auto, {', '.join(DTYPES)}.")
    return DTYPES[name]


def all_eos_token_ids(model: Model, tokenizer: Tokenizer) -> list[int]:
    """Every id that ends a request, the primary one (which has no `stop_reason`) first: it is the tokenizer's."""
    primary = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return list(dict.fromkeys([*primary, *model.config.eos_token_ids]))


def num_sampled_rows(model: Model, tokenizer: Tokenizer) -> int:
    """How many rows of the logits may be sampled: models pad their output head, and a row may belong to no token."""
    return min(model.config.vocab_size, tokenizer.vocab_size)


def context_length(max_model_len: int | None, model: Model, num_kv_tokens: int) -> int:
    """The longest prompt plus output, in tokens: as asked, else what the model was trained for and memory holds.

    Args:
        max_model_len: as asked.
        model: its config says how long a context it was trained for.
        num_kv_tokens: tokens that the KV cache has memory for.

    Raises:
        ModelError: the model was not trained for so many, or there is memory for none.
    """
    check_max_model_len(max_model_len, model)
    if num_kv_tokens < 2 and max_model_len is None:
        raise ModelError("The KV cache holds one token, and no request is that short: give it more memory, or blocks.")
    return max_model_len or min(model.config.max_position_embeddings, num_kv_tokens)


def check_max_model_len(max_model_len: int | None, model: Model) -> None:
    """Raise a `ModelError` for a context that the model was not trained for."""
    longest = model.config.max_position_embeddings
    if max_model_len is not None and (type(max_model_len) is not int or not 1 < max_model_len <= longest):
        raise ModelError(f"max_model_len must be from 2 to the model's own {longest}, got {max_model_len!r}.")
