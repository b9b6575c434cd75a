"""Models for tests: SCRIPT says what it is told to, and the reference answers of transformers."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from common.config import ModelConfig, RopeConfig
from common.llama import KVCacheLike
from common.sampling import sample
from common.sampling_params import SamplingParams, SamplingState

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


class Recall(ScriptModel):
    """Its logits hang on every token that it finds in the KV cache, on their order, and on nothing else.

    Layer 0 stores each token in its V, layer 1 a number made of all tokens up to there. With keys of zero, attention is
    the mean, and mean times length a sum of small integers: exact, and another one where any block is not the right
    one, holds another past, or was never written. `logits_after` says the same from a list of tokens, without a cache.

    The next forward fails once the layers below `fails_in` have written, where that is set; it is then unset.
    """

    NUM_TOKENS, MODULUS = 24, 61  # the ids that it says are below the first; small, so that sums stay exact

    def __init__(self, **config: Any) -> None:
        super().__init__([], prompt_len=0, num_layers=2, **config)
        self.num_computed_tokens = 0
        self.fails_in: int | None = None

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_cache: KVCacheLike, *, rows: Tensor | None = None
    ) -> Tensor:
        self.num_forwards += 1
        self.num_computed_tokens += len(token_ids)
        fails_in, self.fails_in = self.fails_in, None
        values = (token_ids * 7 + positions * 3 + 1) % self.MODULUS
        for layer in range(2):
            if fails_in == layer:
                raise RuntimeError("the model failed")
            values = self._attend(kv_cache, layer, values, positions)
        if fails_in == 2:
            raise RuntimeError("the model failed")
        return (values if rows is None else values[rows])[:, None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        logits = torch.full((len(hidden), self.config.vocab_size), -100.0)
        logits[:, : self.NUM_TOKENS] = self._spread(hidden)
        return logits

    @classmethod
    def logits_after(cls, token_ids: Sequence[int], vocab_size: int) -> Tensor:
        """The last token's logits, `[1, vocab_size]`."""
        total = below = 0
        for position, token_id in enumerate(token_ids):
            below += (token_id * 7 + position * 3 + 1) % cls.MODULUS
            total += below % cls.MODULUS
        logits = torch.full((1, vocab_size), -100.0)
        logits[:, : cls.NUM_TOKENS] = cls._spread(torch.tensor([[float(total % cls.MODULUS)]]))
        return logits

    def _attend(self, kv_cache: KVCacheLike, layer: int, values: Tensor, positions: Tensor) -> Tensor:
        zeros = torch.zeros(len(values), 1, self.config.head_dim)
        means = kv_cache.attend(layer, zeros, zeros, zeros + values[:, None, None])[:, 0]
        sums = means * (positions + 1)[:, None]
        assert (sums - sums.round()).abs().max() < 0.1, "what it reads is no sum of what it has written"
        return sums[:, 0].round().long() % self.MODULUS

    @classmethod
    def _spread(cls, state: Tensor) -> Tensor:
        """Logits from `[R, 1]` states: no two of a row are alike, so that the greatest is one."""
        return (state * 5 + torch.arange(cls.NUM_TOKENS) * 11) % cls.MODULUS / 8


def recalled(prompt: Sequence[int], params: SamplingParams, *, vocab_size: int, index: int = 0) -> list[int]:
    """What `Recall` answers as choice `index`: token by token from the whole text, without an engine or a cache."""
    seed = (params.seed or 0) + index
    state = SamplingState.create(params, list(prompt), SCRIPT_CONFIG.eos_token_ids, seed=seed)
    while not state.output_token_ids or state.finish_reason(SCRIPT_CONFIG.max_position_embeddings) is None:
        logits = Recall.logits_after([*prompt, *state.output_token_ids], vocab_size)
        state.output_token_ids.append(sample(logits, [state]).token_ids[0])
    return state.output_token_ids


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
