"""From the flags to what computes: kernels or plain PyTorch, and a model and a KV cache for it.

--kernels torch      PyTorch alone, as up to v0.8: the control
--kernels c          on a CPU, the kernels in C, or an error that says why they cannot run here
--kernels triton     on a GPU, decodes that attend in place, and CUDA graphs of them; or an error that says why not
--kernels auto       what can run of these; else PyTorch, and if a compiler or Triton is missing, the log says so
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

from . import choosing, cuda_graphs
from .cuda_graphs import RecordedLlama
from .cuda_kv_cache import CudaKVCache, DecodeAttention
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
        if decode_attention_for(args, weights["norm"].device) is not None:
            return RecordedLlama.packed(config, weights)
        kernels = kernels_for(args, weights["norm"].device, weights["norm"].dtype)
        return Llama.packed(config, weights) if kernels is None else pack(config, weights, kernels, args)

    return loading.load(model, tokenizer, device=args.device, dtype=args.dtype, load_format=load_format, make=make)


def make_kv_cache(args: EngineArgs, model: Model, num_blocks: int, attention: AttentionBackend) -> KVCache:
    """The pool of a model: read in place by the kernels, where there are any; on a GPU, with recorded decodes."""
    config, block_size, device, dtype = model.config, args.block_size, model.device, model.dtype
    decode_attention = decode_attention_for(args, device)
    if decode_attention is not None:
        sizes = cuda_graphs.sizes_for(args)
        pool = CudaKVCache(
            *(config, num_blocks, block_size, device, dtype, attention, decode_attention, args.max_num_seqs, sizes)
        )
        if not isinstance(model, RecordedLlama) or _record(args, model, pool):
            return pool
        del pool  # before another one takes its memory
    kernels = kernels_for(args, device, dtype)
    if kernels is not None:
        return PagedKVCache(config, num_blocks, block_size, attention, kernels)
    return KVCache(config, num_blocks, block_size, device, dtype, attention)


def decode_attention_for(args: EngineArgs, device: torch.device) -> DecodeAttention | None:
    """The attention of decodes on a GPU, which reads blocks in place, or `None` for PyTorch's and for the kernels in C.

    Raises:
        ModelError: it was asked for, and cannot run.
    """
    if args.kernels == "torch" or args.needs_c is not None:
        return None
    if device.type == "cuda":
        try:
            from .kernels.decode import paged_decode

            return paged_decode
        except ImportError as error:
            obstacle = f"Triton, which comes with PyTorch's builds for CUDA on Linux, cannot be imported ({error})"
            _warn_once(obstacle)
    else:
        obstacle = f"it runs on a GPU, and the model is on the {device.type}"
    if args.kernels == "triton":
        raise ModelError(f"kernels triton cannot run here: {obstacle}.")
    return None


def _record(args: EngineArgs, model: RecordedLlama, pool: CudaKVCache) -> bool:
    """Whether it can be done: the attention is compiled here, too, and may fail to be."""
    try:
        pool.recordings = cuda_graphs.Recordings(model, pool)
    except Exception as error:  # Triton's own errors have no common name
        if args.kernels == "triton":
            raise ModelError(f"kernels triton cannot record decodes as CUDA graphs: {error}") from error
        logger.warning("Decodes run on PyTorch alone, since they cannot be recorded as CUDA graphs: %s", error)
        return False
    return True


def kernels_for(args: EngineArgs, device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """The kernels in C for a model on this device in this dtype, or `None` for PyTorch.

    Raises:
        ModelError: they were asked for, and cannot run.
    """
    if args.kernels in ("triton", "torch"):
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
    if args.needs_c is not None:
        raise ModelError(f"{args.needs_c} needs the kernels in C, and {kernels}.")
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
    if isinstance(model, RecordedLlama):
        return "Products: PyTorch; attention of decodes: Triton, on blocks in place; steps of decodes: CUDA graphs"
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
