"""How many blocks the pool has: as told, or as much as memory holds.

On a GPU the answer is found by trying: the largest step is run once, and what it leaves free belongs to KV. On a CPU
the system's memory is not ours to fill, so the pool is 1 GiB unless told otherwise. The largest step is a token budget
full of prompts, that of the most decodes gathers up to twice the blocks of a layer: both must have room.
"""

import logging
from dataclasses import dataclass

import torch

from common import loading
from common.attention import AttentionBackend
from common.errors import ModelError
from common.llama import Model
from common.sampling import sample
from common.sampling_params import SamplingParams, SamplingState
from common.units import format_bytes, parse_bytes

from . import cuda_graphs
from .engine_args import EngineArgs
from .kv_cache import MOST_PADDING, KVCache

logger = logging.getLogger(__name__)

CPU_POOL_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The number of blocks, the tokens they hold, and the sum that led to them, for people to read."""

    num_blocks: int
    num_tokens: int
    explanation: str


def pool_size(
    args: EngineArgs, model: Model, attention: AttentionBackend, draft_model: Model | None = None
) -> PoolSize:
    """Decide how many blocks there are; a draft model has as many, in the same memory.

    Raises:
        ModelError: there is not room for one block.
    """
    if args.num_blocks is not None:
        return _describe(args, model, args.num_blocks, "as asked")
    if args.kv_cache_memory is not None:
        memory, reason = parse_bytes(args.kv_cache_memory, "kv_cache_memory"), "as asked"
    elif model.device.type == "cuda":
        memory, reason = _profile(args, model, attention, cuda_graphs.num_bytes(args, model, draft_model))
    else:
        memory, reason = CPU_POOL_BYTES, "the default on a CPU"
    block = bytes_per_block(args, model) + (0 if draft_model is None else bytes_per_block(args, draft_model))
    num_blocks = memory // block
    if num_blocks < 1:
        raise ModelError(
            f"The KV pool has {format_bytes(memory)} ({reason}), less than one block ({format_bytes(block)}): give it "
            "more memory."
        )
    return _describe(args, model, num_blocks, f"{format_bytes(memory)}, {reason}")


def context_length(args: EngineArgs, model: Model, pool: PoolSize) -> int:
    """The longest prompt plus output; a warning says so where the pool holds less than was asked for.

    Raises:
        ModelError: the model was not trained for so many.
    """
    max_model_len = loading.context_length(args.max_model_len, model, pool.num_tokens)
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


def _describe(args: EngineArgs, model: Model, num_blocks: int, reason: str) -> PoolSize:
    config, block, num_tokens = model.config, bytes_per_block(args, model), num_blocks * args.block_size
    return PoolSize(
        num_blocks,
        num_tokens,
        f"KV pool ({reason}): {num_blocks} blocks of 2 x {config.num_layers} layers x {config.num_kv_heads} KV heads "
        f"x {config.head_dim} x {model.dtype.itemsize} bytes x {args.block_size} tokens = {format_bytes(block)}, "
        f"together {format_bytes(num_blocks * block)} for {num_tokens} tokens",
    )


@torch.inference_mode()
def _profile(args: EngineArgs, model: Model, attention: AttentionBackend, graphs: int) -> tuple[int, str]:
    """Bytes that the largest step and the CUDA graphs leave for KV within `gpu_memory_utilization` of the card."""
    num_tokens, device = args.max_num_batched_tokens, model.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    num_blocks = -(-num_tokens // args.block_size)
    cache = KVCache(model.config, num_blocks, args.block_size, device, model.dtype, attention)
    cache.begin_step([list(range(num_blocks))], [num_tokens], [num_tokens])
    positions = torch.arange(num_tokens, device=device)
    num_rows = min(num_tokens, args.max_num_seqs)  # as many as can be sampled at once
    state = SamplingState.create(SamplingParams(top_p=0.9), [0], [], seed=0)
    try:
        hidden = model.forward(torch.zeros_like(positions), positions, cache, rows=positions[-num_rows:])
        sample(model.logits(hidden), [state] * num_rows)
    except torch.OutOfMemoryError:
        raise ModelError(
            f"A step of {num_tokens} tokens does not fit on the GPU: lower --max-num-batched-tokens."
        ) from None
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - before - cache.kv.nbytes
    del cache, hidden
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    taken = total - free  # the weights, CUDA itself, and whatever else is on the card
    memory = int(total * args.gpu_memory_utilization) - taken - activations - graphs
    num_layers = model.config.num_layers
    padding = args.max_num_seqs * MOST_PADDING * bytes_per_block(args, model) // num_layers
    # Of what is left, the pool gets all but two layers' worth, which a step's decodes may gather.
    return max(memory - padding, 0) * num_layers // (num_layers + 2), (
        f"{format_bytes(total)} x {args.gpu_memory_utilization:g} - {format_bytes(taken)} taken - "
        f"{format_bytes(activations)} for a step of {num_tokens} tokens - {format_bytes(graphs)} for CUDA graphs, "
        "and room to gather decodes"
    )
