"""The engine of v0.2: one request, one loop, on blocks.

    prompt -> token ids -> [ forward -> logits -> sample -> append ] until it ends -> text

The first pass through the loop computes the whole prompt (*prefill*), every later one a single token (*decode*): it is
the same code, on more or fewer tokens. Several prompts are served one after the other. A request takes a block when its
last one is full, and gives all of them back when it ends, however it ends. v0.3 takes the loop apart, so that requests
share each pass.
"""

import contextlib
import random
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common import loading
from common import prompts as prompt_forms
from common.attention import select_backend
from common.detokenizer import Detokenizer
from common.errors import RequestError
from common.llama import Model
from common.outputs import CompletionOutput, RequestMetrics, RequestOutput
from common.prompts import Prompt
from common.sampling import SamplerOutput, sample
from common.sampling_params import FinishReason, SamplingParams, SamplingState, check_request
from common.tokenizer import Tokenizer

from .block_manager import BlockManager
from .engine_args import EngineArgs
from .kv_cache import KVCache
from .memory import context_length, pool_size

Messages = Sequence[dict[str, Any]]
POOL_FULL = "The KV pool has no free block left: other streams are still open, so read them to the end or close them."


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
        loading.check_max_model_len(args.max_model_len, self.model)
        self.pool = pool_size(args, self.model, self.attention)
        self.kv_cache = KVCache(
            self.model.config,
            self.pool.num_blocks,
            args.block_size,
            self.model.device,
            self.model.dtype,
            self.attention,
        )
        self.block_manager = BlockManager(self.pool.num_blocks, args.block_size)
        self.max_model_len = context_length(args, self.model, self.pool)
        self.max_request_len = min(self.max_model_len, self.pool.num_tokens + 1)  # the last token needs no KV
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
            RequestError: one of them cannot be served; then none was. Or streams that are still open hold the blocks.
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
            RequestError: at once, not at the first step; at a later one only if other open streams hold the blocks.
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
        check_request(
            len(token_ids),
            params,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            num_kv_tokens=self.pool.num_tokens,
        )
        return token_ids

    def _serve(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        """Run requests one after the other, and put the deltas of each together."""
        bar = tqdm(requests, desc="Requests", disable=None if use_tqdm else True, delay=1.0)
        return [self._collect(request) for request in bar]

    def _collect(self, request: Request) -> RequestOutput:
        choices = [CompletionOutput(index) for index in range(request.params.n)]
        with contextlib.closing(self._run(request)) as outputs:  # an interrupt here leaves the blocks at once, too
            for output in outputs:
                for delta in output.outputs:
                    choices[delta.index].extend(delta)
        output.outputs = choices
        return output

    def _run(self, request: Request) -> Generator[RequestOutput, None, None]:
        metrics = RequestMetrics(request.arrival_time)
        for index in range(request.params.n):
            if not self.block_manager.can_allocate(len(request.prompt_token_ids)):
                raise RequestError(POOL_FULL)
            # Twice, as Ctrl-C may come while the inner one takes the blocks back.
            with self._owning_blocks(request.request_id), self._owning_blocks(request.request_id):
                self.block_manager.allocate(request.request_id, len(request.prompt_token_ids))
                for delta in self._complete(request, index, metrics):
                    finished = delta.finish_reason is not None and index == request.params.n - 1
                    yield RequestOutput(
                        request.request_id, request.prompt, request.prompt_token_ids, [delta], finished, metrics
                    )
                self.block_manager.free(request.request_id)

    @contextlib.contextmanager
    def _owning_blocks(self, request_id: str) -> Iterator[None]:
        """Take a request's blocks back if it is left by its reader, fails, or is interrupted by Ctrl-C at any line."""
        try:
            yield
        except BaseException:
            self.block_manager.reclaim(request_id)
            raise

    def _complete(self, request: Request, index: int, metrics: RequestMetrics) -> Iterator[CompletionOutput]:
        """The loop: compute one choice of a request, a token at a time."""
        params, blocks = request.params, self.block_manager
        state = SamplingState.create(params, request.prompt_token_ids, self.eos_token_ids, seed=request.seed + index)
        detokenizer = Detokenizer(self.tokenizer, request.prompt_token_ids, params)
        new_token_ids = request.prompt_token_ids  # what the model has not seen: first the prompt, then one token
        finish: FinishReason | None = None
        while finish is None:
            sampled = self._step(blocks.block_table(request.request_id), new_token_ids, state)
            new_token_ids = sampled.token_ids
            state.output_token_ids += new_token_ids
            text, finish = detokenizer.step(new_token_ids, state.finish_reason(self.max_request_len))
            metrics.record_step(*self._kv_bytes(request.request_id))
            delta = CompletionOutput(index, text, new_token_ids)
            delta.finish_reason, delta.stop_reason = finish or (None, None)
            delta.add_logprobs(sampled.logprobs[0], self.tokenizer.token_text)
            yield delta
            if finish is None:
                # The token just sampled is computed next, and needs a slot; a request's last token never does.
                if not blocks.can_append(request.request_id):
                    raise RequestError(POOL_FULL)
                blocks.append(request.request_id)

    def _kv_bytes(self, request_id: str) -> tuple[int, int]:
        """Bytes that a request has reserved (its blocks), and that hold the K and V of a token."""
        manager, bytes_per_block = self.block_manager, self.kv_cache.bytes_per_block
        used = manager.num_tokens(request_id) * bytes_per_block // manager.block_size
        return len(manager.block_table(request_id)) * bytes_per_block, used

    @torch.inference_mode()
    def _step(self, block_table: list[int], token_ids: list[int], state: SamplingState) -> SamplerOutput:
        """One forward pass over the tokens that are new, and the next token."""
        device = self.model.device
        context_len = len(state.prompt_token_ids) + len(state.output_token_ids)
        self.kv_cache.begin_step(block_table, query_len=len(token_ids), context_len=context_len)
        hidden = self.model.forward(
            torch.tensor(token_ids, device=device),
            torch.arange(context_len - len(token_ids), context_len, device=device),
            self.kv_cache,
            rows=torch.tensor([len(token_ids) - 1], device=device),  # only the last token's successor is wanted
        )
        return sample(self.model.logits(hidden)[:, : self.vocab_size], [state])
