"""From the flags to what computes: the kernels in C or plain PyTorch, and a model and a KV cache for it.

--kernels torch      PyTorch alone, as up to v0.8: the control
--kernels c          the kernels, or an error that says why they cannot run here
--kernels auto       the kernels where they can run; else PyTorch, and a line of the log says why
"""

import functools
import logging
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from common import loading
from common.attention import AttentionBackend
from common.config import ModelConfig
from common.errors import ModelError
from common.llama import Llama, Model
from common.tokenizer import Tokenizer

from . import choosing
from .engine_args import EngineArgs
from .kernels import bindings
from .kernels.bindings import Kernels
from .kv_cache import KVCache
from .matrices import Matrix
from .model import FastLayer, FastLlama
from .paged_kv_cache import PagedKVCache

logger = logging.getLogger(__name__)


def load(
    model: str | Path | Model | None, tokenizer: Tokenizer | None, args: EngineArgs, load_format: str = "auto"
) -> tuple[Model, Tokenizer]:
    """`common.loading.load`, with the kernels where they are wanted; a ready model stays what it is."""

    def make(config: ModelConfig, weights: dict[str, Tensor]) -> Model:
        kernels = kernels_for(args, weights["norm"].device, weights["norm"].dtype)
        return Llama.packed(config, weights) if kernels is None else pack(config, weights, kernels, args)

    return loading.load(model, tokenizer, device=args.device, dtype=args.dtype, load_format=load_format, make=make)


def make_kv_cache(args: EngineArgs, model: Model, num_blocks: int, attention: AttentionBackend) -> KVCache:
    """The pool of a model: read in place by the kernels, where there are any."""
    kernels = kernels_for(args, model.device, model.dtype)
    if kernels is not None:
        return PagedKVCache(model.config, num_blocks, args.block_size, kernels)
    return KVCache(model.config, num_blocks, args.block_size, model.device, model.dtype, attention)


def kernels_for(args: EngineArgs, device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """The kernels for a model on this device in this dtype, or `None` for PyTorch.

    Raises:
        ModelError: they were asked for, and cannot run.
    """
    if args.kernels == "torch":
        return None
    kernels: Kernels | str
    if device.type != "cpu":
        kernels = f"they run on a CPU, and the model is on {device.type}"
    elif dtype != torch.float32:
        kernels = f"they compute in float32, and dtype is {str(dtype).removeprefix('torch.')}"
    else:
        kernels = bindings.load()
        if isinstance(kernels, str):
            _warn_once(kernels)
    if isinstance(kernels, Kernels):
        return kernels
    if args.kernels == "c" or args.weights_dtype != "auto":
        asked = "kernels c" if args.kernels == "c" else f"weights_dtype {args.weights_dtype}"
        raise ModelError(f"{asked} needs the kernels in C, and {kernels}.")
    return None


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("The engine runs on PyTorch alone, which is slower: %s.", reason)


def pack(config: ModelConfig, weights: dict[str, Tensor], kernels: Kernels, args: EngineArgs) -> FastLlama:
    """Pack a model's plain float32 weights, which are taken out of `weights` one by one, so that each can be freed."""
    dtype = loading.DTYPES["float32" if args.weights_dtype == "auto" else args.weights_dtype]
    names = [field.name for field in fields(FastLayer)]
    rows_of = {
        name: _most_rows(args, kernels, [weights[f"layers.{i}.{name}"] for i in range(config.num_layers)])
        for name in names
        if name.endswith("_proj")
    }

    def take(i: int, name: str) -> Tensor | Matrix:
        tensor = weights.pop(f"layers.{i}.{name}")
        if tensor.ndim == 1:
            return tensor
        return Matrix.packed(kernels, tensor, weights.pop(f"layers.{i}.{name}_bias", None), dtype, rows_of[name])

    progress = tqdm(range(config.num_layers), desc="Packing weights", unit="layer", disable=None, delay=1.0)
    layers = [FastLayer(**{name: take(i, name) for name in names}) for i in progress]  # type: ignore[arg-type]
    lm_head = weights.pop("lm_head")
    head = Matrix.packed(kernels, lm_head, None, dtype, _most_rows(args, kernels, [lm_head]))
    return FastLlama(config, weights.pop("embed_tokens"), layers, weights.pop("norm"), head, kernels)


def _most_rows(args: EngineArgs, kernels: Kernels, weights: list[Tensor]) -> float:
    """See `Matrix`: oneDNN's product knows no weights of 16 bits that are multiplied in float32."""
    if args.linear_backend == "c" or args.weights_dtype not in ("auto", "float32"):
        return float("inf")
    return 0 if args.linear_backend == "onednn" else choosing.most_rows(kernels, weights)


def explain(model: Model) -> str:
    """Who computes the model's products, for people to read."""
    if not isinstance(model, FastLlama):
        return "Products and attention: PyTorch"
    layer = model.fast_layers[0]
    matrices = {field.name: getattr(layer, field.name) for field in fields(FastLayer)} | {"lm_head": model.head}
    parts = [f"{name} {_describe(m)}" for name, m in matrices.items() if isinstance(m, Matrix)]
    return f"Products: {', '.join(parts)}; attention: kernels in C, on blocks in place"


def _describe(matrix: Matrix) -> str:
    if matrix.panels is None:
        return "oneDNN"
    ours = f"C ({str(matrix.panels.dtype).removeprefix('torch.')})"
    return ours if matrix.reordered is None else f"{ours} up to {matrix.most_rows:g} rows, then oneDNN"
