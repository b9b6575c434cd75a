"""Models for tests: SCRIPT says what it is told to, and the reference answers of transformers."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from common.config import ModelConfig, RopeConfig
from common.llama import KVCacheLike

SCRIPT_CONFIG = ModelConfig(
    vocab_size=272,  # more than BYTE-TOK has: as in real models, some rows belong to no token
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=1024,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    tie_word_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    eos_token_ids=(257, 258),
    dtype="float32",
)


class ScriptModel:
    """SCRIPT: a model whose argmax at output step `i` is the script's `i`-th id, whatever else is in the batch.

    It knows the step from a token's position, so it has to be told how long the prompt is. Past the script's end it
    repeats the last id. `runner_up` is second best everywhere, for tests that mask the best. It counts its forwards.
    """

    def __init__(self, script: Sequence[int], prompt_len: int, *, runner_up: int = 120, **config: Any) -> None:
        self.script, self.prompt_len, self.runner_up = list(script), prompt_len, runner_up
        self.config = ModelConfig(**{name: getattr(SCRIPT_CONFIG, name) for name in SCRIPT_CONFIG.__slots__} | config)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.num_forwards = 0

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_cache: KVCacheLike, *, rows: Tensor | None = None
    ) -> Tensor:
        self.num_forwards += 1
        zeros = torch.zeros(len(token_ids), 1, self.config.head_dim)
        kv_cache.attend(0, zeros, zeros, zeros)  # every token's K and V are stored, as a real model would
        wanted = positions if rows is None else positions[rows]
        steps = (wanted - self.prompt_len + 1).clamp(0, len(self.script) - 1)
        return steps[:, None].expand(-1, self.config.hidden_size).float()

    def logits(self, hidden: Tensor) -> Tensor:
        logits = torch.zeros(len(hidden), self.config.vocab_size)
        logits[:, self.runner_up] = 5.0
        logits[torch.arange(len(hidden)), [self.script[int(step)] for step in hidden[:, 0]]] = 10.0
        return logits


class Successor(ScriptModel):
    """Says the byte after the one it has just read (`a` is answered `bcd...`), to each request on its own.

    It fails in the forwards of these numbers, and in all that read the byte `poison`.
    """

    def __init__(self, *, fails_at=(), poison=None):
        super().__init__([], prompt_len=0)
        self.fails_at, self.poison = fails_at, poison

    def forward(self, token_ids, positions, kv_cache, *, rows=None):
        super_rows = super().forward(token_ids, positions.clamp(max=0), kv_cache, rows=rows)
        if self.num_forwards in self.fails_at or (self.poison is not None and ord(self.poison) in token_ids):
            raise RuntimeError("the model failed")
        return token_ids[rows][:, None].expand_as(super_rows).float()

    def logits(self, hidden):
        self.script = [(step + 1) % 128 for step in range(256)]
        return super().logits(hidden)


class Stepped(ScriptModel):
    """SCRIPT that computes a step only when `steps` is released."""

    def __init__(self, script, prompt_len):
        super().__init__(script, prompt_len)
        self.steps = threading.Semaphore(0)

    def forward(self, *args, **kwargs):
        assert self.steps.acquire(timeout=20)
        return super().forward(*args, **kwargs)


class OneShotCache:
    """The smallest thing that attends: all sequences whole, nothing kept. For tests of the model alone."""

    def __init__(self, lens: Sequence[int]) -> None:
        self.lens = list(lens)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from common.attention import sdpa

        return sdpa(q, k, v, self.lens, self.lens)


def reference_tokens(hf_model: Any, prompt_token_ids: list[int], num_tokens: int) -> list[int]:
    """The greedy continuation by transformers' `generate`, past any end token."""
    from transformers import GenerationConfig

    # `None` would be replaced by the model's own end tokens; an id past the vocabulary never comes.
    no_end = hf_model.config.vocab_size
    config = GenerationConfig(do_sample=False, max_new_tokens=num_tokens, eos_token_id=no_end, pad_token_id=0)
    prompt = torch.tensor([prompt_token_ids])
    with torch.inference_mode():
        out = hf_model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    token_ids = out[0, len(prompt_token_ids) :].tolist()
    assert len(token_ids) == num_tokens
    return token_ids
