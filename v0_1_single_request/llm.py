"""The engine of v0.1: one request, one loop.

    prompt -> token ids -> [ forward -> logits -> sample -> append ] until it ends -> text

The first pass through the loop computes the whole prompt (*prefill*), every later one a single token (*decode*): it is
the same code, on more or fewer tokens. Several prompts are served one after the other. v0.2 gives the cache blocks;
v0.3 takes the loop apart, so that requests share each pass.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common import loading
from common import prompts as prompt_forms
from common.attention import select_backend
from common.detokenizer import Detokenizer
from common.llama import Model
from common.outputs import CompletionOutput, RequestMetrics, RequestOutput
from common.prompts import Prompt
from common.sampling import SamplerOutput, sample
from common.sampling_params import FinishReason, SamplingParams, SamplingState, check_request
from common.tokenizer import Tokenizer

from .engine_args import EngineArgs
from .kv_cache import KVCache

Messages = Sequence[dict[str, Any]]
MAX_SLAB_BYTES = 2**30  # unless max_model_len is given, the context ends where its slab would pass 1 GiB


@dataclass(slots=True)
class Request:
    """A checked request: it fits, and every id in it is known to the model."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    arrival_time: float


class LLM:
    """Text in, text out, one request after the other.

    Args:
        model: what `--model` takes (`common.weights.resolve`), or a ready model, which then needs its `tokenizer`.
        tokenizer: replaces the one in the model's folder.
        engine_args: the fields of `EngineArgs`, as keywords.

    Raises:
        ModelError: the model cannot be loaded, or not as asked.
    """

    def __init__(
        self, model: str | Path | Model | None = None, *, tokenizer: Tokenizer | None = None, **engine_args: Any
    ) -> None:
        args = EngineArgs(**engine_args)
        self.model, self.tokenizer = loading.load(model, tokenizer, device=args.device, dtype=args.dtype)
        self.attention = select_backend(args.attention_backend, self.model.device, self.model.dtype)
        slab_tokens = MAX_SLAB_BYTES // (self.model.config.kv_elements_per_token * self.model.dtype.itemsize)
        self.max_model_len = loading.context_length(args.max_model_len, self.model, slab_tokens)
        self.eos_token_ids = loading.all_eos_token_ids(self.model, self.tokenizer)
        self.vocab_size = loading.num_sampled_rows(self.model, self.tokenizer)
        self._seeds = random.Random(args.seed)
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, each text or token ids; whole answers, in the order of the prompts.

        Raises:
            RequestError: one of them cannot be served; then none was.
        """
        inputs = prompt_forms.as_list(prompts)
        params = prompt_forms.params_for_each(sampling_params, len(inputs))
        return self._serve(self._requests(inputs, params), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template; raises as `generate` does."""
        conversations = prompt_forms.as_conversations(messages)
        params = prompt_forms.params_for_each(sampling_params, len(conversations))
        token_ids = [
            self.tokenizer.chat_token_ids(conversation, add_generation_prompt, continue_final_message)
            for conversation in conversations
        ]
        return self._serve(self._requests(token_ids, params), use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, as it is written: every output holds only what its step added (a delta).

        With `n > 1` the choices come one after the other, told apart by their `index`.

        Raises:
            RequestError: at once, not at the first step.
        """
        [request] = self._requests([prompt], prompt_forms.params_for_each(sampling_params, 1))
        return self._run(request)

    def _requests(self, prompts: Sequence[Prompt], all_params: Sequence[SamplingParams]) -> list[Request]:
        """Check all prompts, and only then make requests of them: one that is refused changes nothing."""
        arrival_time = time.perf_counter()
        token_ids = prompt_forms.for_each(self._validate, prompts, all_params)
        requests = []
        for prompt, ids, params in zip(prompts, token_ids, all_params, strict=True):
            text = prompt if isinstance(prompt, str) else None
            seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
            requests.append(Request(str(self._num_requests), text, ids, params, seed, arrival_time))
            self._num_requests += 1
        return requests

    def _validate(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The token ids of a prompt that can be served."""
        token_ids = prompt_forms.encode(prompt, self.tokenizer, self.model.config.vocab_size)
        check_request(len(token_ids), params, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        return token_ids

    def _serve(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        """Run requests one after the other, and put the deltas of each together."""
        bar = tqdm(requests, desc="Requests", disable=None if use_tqdm else True, delay=1.0)
        return [self._collect(request) for request in bar]

    def _collect(self, request: Request) -> RequestOutput:
        choices = [CompletionOutput(index) for index in range(request.params.n)]
        for output in self._run(request):
            for delta in output.outputs:
                choices[delta.index].extend(delta)
        output.outputs = choices
        return output

    def _run(self, request: Request) -> Iterator[RequestOutput]:
        metrics = RequestMetrics(request.arrival_time)
        for index in range(request.params.n):
            for delta in self._complete(request, index, metrics):
                finished = delta.finish_reason is not None and index == request.params.n - 1
                yield RequestOutput(
                    request.request_id, request.prompt, request.prompt_token_ids, [delta], finished, metrics
                )

    def _complete(self, request: Request, index: int, metrics: RequestMetrics) -> Iterator[CompletionOutput]:
        """The loop: compute one choice of a request, a token at a time."""
        params = request.params
        state = SamplingState.create(params, request.prompt_token_ids, self.eos_token_ids, seed=request.seed + index)
        detokenizer = Detokenizer(self.tokenizer, request.prompt_token_ids, params)
        config, device, dtype = self.model.config, self.model.device, self.model.dtype
        kv_cache = KVCache(config, self.max_model_len, device, dtype, self.attention)
        new_token_ids = request.prompt_token_ids  # what the model has not seen: first the prompt, then one token
        finish: FinishReason | None = None
        while finish is None:
            sampled = self._step(kv_cache, new_token_ids, state)
            new_token_ids = sampled.token_ids
            state.output_token_ids += new_token_ids
            text, finish = detokenizer.step(new_token_ids, state.finish_reason(self.max_model_len))
            metrics.record_step(kv_cache.reserved_bytes, kv_cache.used_bytes)
            delta = CompletionOutput(index, text, new_token_ids)
            delta.finish_reason, delta.stop_reason = finish or (None, None)
            delta.add_logprobs(sampled.logprobs[0], self.tokenizer.token_text)
            yield delta

    @torch.inference_mode()
    def _step(self, kv_cache: KVCache, token_ids: list[int], state: SamplingState) -> SamplerOutput:
        """One forward pass over the tokens that are new, and the next token."""
        device = self.model.device
        kv_cache.begin_step(len(token_ids))
        hidden = self.model.forward(
            torch.tensor(token_ids, device=device),
            torch.arange(kv_cache.context_len - len(token_ids), kv_cache.context_len, device=device),
            kv_cache,
            rows=torch.tensor([len(token_ids) - 1], device=device),  # only the last token's successor is wanted
        )
        return sample(self.model.logits(hidden)[:, : self.vocab_size], [state])
