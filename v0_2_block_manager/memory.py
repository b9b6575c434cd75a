"""How many blocks the pool has: as told, or as much as memory holds.

On a GPU the answer is found by trying: the largest step is run once, and what it leaves free belongs to KV. On a CPU
the system's memory is not ours to fill, so the pool is 1 GiB unless told otherwise. Changes in no milestone before
v0.6.
"""

import logging
from dataclasses import dataclass

import torch

from common import loading
from common.attention import AttentionBackend
from common.errors import ModelError
from common.llama import Model
from common.units import format_bytes, parse_bytes

from .engine_args import EngineArgs
from .kv_cache import KVCache

logger = logging.getLogger(__name__)

CPU_POOL_BYTES = 2**30
MAX_PROFILED_TOKENS = 8192  # a prompt is one step, so it is also the longest context on a GPU unless one is asked for


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The number of blocks, and the sum that led to it, for people to read.

    `num_tokens` is what the pool holds, `max_context` the longest sequence to serve where nobody says otherwise.
    """

    num_blocks: int
    num_tokens: int
    max_context: int
    explanation: str


def pool_size(args: EngineArgs, model: Model, attention: AttentionBackend) -> PoolSize:
    """Decide how many blocks there are.

    Raises:
        ModelError: there is not room for one block.
    """
    max_context = None
    if args.num_blocks is not None:
        return _describe(args, model, args.num_blocks, "as asked")
    if args.kv_cache_memory is not None:
        memory, reason = parse_bytes(args.kv_cache_memory, "kv_cache_memory"), "as asked"
    elif model.device.type == "cuda":
        memory, reason = _profile(args, model, attention)
        max_context = profiled_tokens(args, model)
    else:
        memory, reason = CPU_POOL_BYTES, "the default on a CPU"
    block = bytes_per_block(args, model)
    num_blocks = memory // block
    if num_blocks < 1:
        raise ModelError(
            f"The KV pool has {format_bytes(memory)} ({reason}), less than one block ({format_bytes(block)}): give it "
            "more memory."
        )
    return _describe(args, model, num_blocks, f"{format_bytes(memory)}, {reason}", max_context)


def context_length(args: EngineArgs, model: Model, pool: PoolSize) -> int:
    """The longest prompt plus output; a warning says so where the pool holds less than was asked for.

    Raises:
        ModelError: the model was not trained for so many.
    """
    max_model_len = loading.context_length(args.max_model_len, model, pool.max_context)
    if max_model_len > pool.num_tokens:
        logger.warning(
            "max_model_len is %d, but the KV pool holds %d tokens: longer requests are refused one by one.",
            max_model_len,
            pool.num_tokens,
        )
    return max_model_len


def bytes_per_block(args: EngineArgs, model: Model) -> int:
    """2 (K and V) x layers x KV heads x head_dim x bytes per element x tokens in a block."""
    return model.config.kv_elements_per_token * model.dtype.itemsize * args.block_size


def profiled_tokens(args: EngineArgs, model: Model) -> int:
    """The longest prompt that the profiling run stands for."""
    return args.max_model_len or min(model.config.max_position_embeddings, MAX_PROFILED_TOKENS)


def _describe(args: EngineArgs, model: Model, num_blocks: int, reason: str, max_context: int | None = None) -> PoolSize:
    config, block, num_tokens = model.config, bytes_per_block(args, model), num_blocks * args.block_size
    return PoolSize(
        num_blocks,
        num_tokens,
        num_tokens if max_context is None else min(num_tokens, max_context),
        f"KV pool ({reason}): {num_blocks} blocks of 2 x {config.num_layers} layers x {config.num_kv_heads} KV heads "
        f"x {config.head_dim} x {model.dtype.itemsize} bytes x {args.block_size} tokens = {format_bytes(block)}, "
        f"together {format_bytes(num_blocks * block)} for {num_tokens} tokens",
    )


@torch.inference_mode()
def _profile(args: EngineArgs, model: Model, attention: AttentionBackend) -> tuple[int, str]:
    """Bytes that the largest step leaves for KV within `gpu_memory_utilization` of the card."""
    num_tokens, device = profiled_tokens(args, model), model.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    num_blocks = -(-num_tokens // args.block_size)
    cache = KVCache(model.config, num_blocks, args.block_size, device, model.dtype, attention)
    cache.begin_step(list(range(num_blocks)), num_tokens, num_tokens)
    positions = torch.arange(num_tokens, device=device)
    try:
        hidden = model.forward(torch.zeros_like(positions), positions, cache, rows=positions[-1:])
        model.logits(hidden)
    except torch.OutOfMemoryError:
        raise ModelError(f"A step of {num_tokens} tokens does not fit on the GPU: lower --max-model-len.") from None
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - before - cache.kv.nbytes
    del cache, hidden
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    taken = total - free  # the weights, CUDA itself, and whatever else is on the card
    memory = int(total * args.gpu_memory_utilization) - taken - activations
    return max(memory, 0), (
        f"{format_bytes(total)} x {args.gpu_memory_utilization:g} - {format_bytes(taken)} taken - "
        f"{format_bytes(activations)} for a step of {num_tokens} tokens"
    )
