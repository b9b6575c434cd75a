"""Steps of decodes as CUDA graphs: hundreds of launches are recorded once, and replayed by one call.

A kernel of a small step takes a GPU a few microseconds, and Python takes longer to launch the next one. A graph has the
whole pass through the layers in it. What it was recorded with, addresses and sizes, is fixed: ids and positions are
copied to where they were then, the pool's `inputs` never move (`cuda_kv_cache.py`), and a step is padded to the next
size that was recorded. A padded row costs little, since such a step is bound by reading the weights: so the sizes may
be far apart, and there are few recordings.

Not recorded: steps with chunks of prompts, larger steps, some layers alone (`early_exit`), the logits, the sampling.
Not yet run on a GPU.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.llama import KVCacheLike, Llama, Model

from .cuda_kv_cache import CudaKVCache
from .engine_args import EngineArgs

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
BYTES_PER_SIZE = 32 * 2**20  # left free for a recording and its activations: an estimate, not yet measured

Replay = Callable[[], None]


def sizes_for(args: EngineArgs) -> list[int]:
    """Which numbers of decodes are recorded: up to as many as may run, where that is not too many."""
    most = min(args.max_num_seqs, args.max_num_batched_tokens)
    return sorted({min(size, most) for size in SIZES})


def num_bytes(args: EngineArgs, *models: Model | None) -> int:
    """How much memory the recordings of these models may need."""
    return sum(len(sizes_for(args)) * BYTES_PER_SIZE for model in models if isinstance(model, RecordedLlama))


class RecordedLlama(Llama):
    """A Llama that replays a step where its pool has it recorded, and computes it otherwise: `Llama` is its control."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: KVCacheLike,
        *,
        rows: Tensor | None = None,
        num_layers: int | None = None,
    ) -> Tensor:
        """See `Llama.forward`."""
        replay = kv_cache.replay if isinstance(kv_cache, CudaKVCache) and num_layers is None else None
        if replay is not None:
            hidden = replay(token_ids, positions)
            return hidden.clone() if rows is None else hidden[rows]  # a copy: the next replay writes there
        return super().forward(token_ids, positions, kv_cache, rows=rows, num_layers=num_layers)


class Recordings:
    """A model's decodes on one pool, recorded for each of the pool's sizes.

    Args:
        model: its weights stay where they are.
        kv_cache: what is in it does not matter, and nothing of it but the spare block changes.

    Raises:
        RuntimeError: CUDA cannot record them, or has no room for that.
    """

    @torch.inference_mode()
    def __init__(self, model: Llama, kv_cache: CudaKVCache) -> None:
        self.token_ids = torch.zeros(kv_cache.sizes[-1], dtype=torch.long, device=model.device)
        self.positions = torch.zeros_like(self.token_ids)
        self._recorded: dict[int, tuple[Replay, Tensor]] = {}
        memory = None
        for size in reversed(kv_cache.sizes):  # the largest first: the smaller ones find room in its memory
            kv_cache.begin_padding(size)
            step = functools.partial(Llama.forward, model, self.token_ids[:size], self.positions[:size], kv_cache)
            replay, hidden, memory = record(step, memory)
            self._recorded[size] = replay, hidden

    def replay(self, size: int, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Compute a step that the pool has begun, padded to `size`.

        Args:
            size: one of the sizes.
            token_ids: `[T]`, at most so many.
            positions: `[T]`.

        Returns:
            `[T, hidden_size]`, until the next replay.
        """
        replay, hidden = self._recorded[size]
        num = len(token_ids)
        self.token_ids[:num], self.positions[:num] = token_ids, positions  # behind them, any ids will do
        replay()
        return hidden[:num]


def record(run: Callable[[], Tensor], memory: Any) -> tuple[Replay, Tensor, Any]:
    """Record what `run` launches.

    Args:
        run: always launches the same.
        memory: of the recordings before this one, which are never replayed at the same time and so can share it;
            `None` for the first.

    Returns:
        What replays it, the tensor that `run` returned, where each replay puts its result, and the memory to share.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles kernels and makes workspaces, which is not to be recorded
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory):
        hidden = run()
    return graph.replay, hidden, graph.pool()
