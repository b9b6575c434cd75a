"""The engine: requests in, one step at a time, deltas out. Every driver (offline, server, benchmark) calls `step()`.

    add_request -> waiting -> [ schedule -> run -> update -> process ] -> RequestOutput deltas

It wires the rooms together and knows no torch: `model_runner` and `kv_cache` do, and are imported when an engine is
made. `async_engine.py` drives it from a thread of its own.
"""

import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import prompts as prompt_forms
from common.errors import RequestError
from common.outputs import RequestMetrics, RequestOutput
from common.prompts import Prompt
from common.sampling_params import SamplingParams, SamplingState, check_request

from .block_manager import BlockManager
from .engine_args import EngineArgs, shape_folder
from .events import EventBus, RequestAborted, RequestQueued
from .output_processor import OutputProcessor, Parent, Snapshot
from .request import Request, RequestStatus
from .scheduler import Scheduler, SchedulerOutput, no_drafts
from .step_events import emit_step

if TYPE_CHECKING:
    from common.llama import Model
    from common.tokenizer import Tokenizer

    from .model_runner import Sampled

logger = logging.getLogger(__name__)

PROMPT_CHARS = 500  # of a prompt's text that an event tells


class LLMEngine:
    """Serves many requests at once, a step at a time.

    Args:
        model: what `--model` takes (`common.weights.resolve`), or a ready model, which then needs its `tokenizer`.
        tokenizer: replaces the one in the model's folder.
        engine_args: the fields of `EngineArgs`, as keywords.

    Raises:
        ModelError: the model cannot be loaded, or not as asked.
    """

    def __init__(
        self, model: "str | Path | Model | None" = None, *, tokenizer: "Tokenizer | None" = None, **engine_args: Any
    ) -> None:
        from common import loading
        from common.attention import select_backend

        from .drafting import load_draft_model, make_drafter
        from .loader import load, make_kv_cache
        from .memory import context_length, pool_size
        from .model_runner import ModelRunner

        args = EngineArgs(**engine_args)
        if args.load_format == "dummy":
            model = shape_folder(model)
        self.model, self.tokenizer = load(model, tokenizer, args, args.load_format)
        attention = select_backend(args.attention_backend, self.model.device, self.model.dtype)
        loading.check_max_model_len(args.max_model_len, self.model)
        draft_model = load_draft_model(args, self.model, self.tokenizer)
        self.pool = pool_size(args, self.model, attention, draft_model)
        kv_cache = make_kv_cache(args, self.model, self.pool.num_blocks, attention)
        self.max_model_len = context_length(args, self.model, self.pool)
        self.vocab_size = loading.num_sampled_rows(self.model, self.tokenizer)
        self.eos_token_ids = loading.all_eos_token_ids(self.model, self.tokenizer)
        self.speculative_method = args.speculative_method
        drafter = make_drafter(args, self.model, draft_model, kv_cache, self.vocab_size)
        self.events = EventBus()
        self.scheduler = Scheduler(
            BlockManager(self.pool.num_blocks, args.block_size, args.enable_prefix_caching, self.events),
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_num_seqs=min(args.max_num_seqs, args.max_num_batched_tokens),  # each that runs needs a token
            max_request_len=min(self.max_model_len, self.pool.num_tokens + 1),  # the last token needs no KV
            num_speculative_tokens=args.num_speculative_tokens if drafter is not None else 0,
            disable_below=args.speculative_disable_below,
            count_drafts=no_drafts if drafter is None else drafter.count,
        )
        self.model_runner = ModelRunner(self.model, kv_cache, self.vocab_size, drafter)
        self.output_processor = OutputProcessor(self.tokenizer, self.scheduler.finish_requests)
        self.on_step: Callable[[SchedulerOutput], None] | None = None  # told of every step, for tracing
        # Told whose request failed, and why; without it a step that fails raises.
        self.on_failure: Callable[[str, Exception], None] | None = None
        self.step_time = 0.0  # when the latest step began, for metrics
        self.num_steps = 0  # that have ended
        self._seeds = random.Random(args.seed)

    def validate(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The token ids of a prompt that this engine can serve; raises `RequestError` for one that it never can."""
        token_ids = prompt_forms.encode(prompt, self.tokenizer, self.model.config.vocab_size)
        check_request(
            len(token_ids),
            params,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            num_kv_tokens=self.pool.num_tokens,
            scores_prompts=True,
        )
        if params.n > self.scheduler.max_num_seqs:
            raise RequestError(
                f"n is {params.n}, but at most {self.scheduler.max_num_seqs} requests run at once (max_num_seqs), and "
                "the choices of one begin together: ask for fewer, in several requests.",
                param="n",
            )
        return token_ids

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | None,
        sampling_params: SamplingParams,
        *,
        prompt_token_ids: list[int] | None = None,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Put a request into the queue.

        Args:
            request_id: the caller's name for it, of no other request that is still here.
            prompt: text or token ids.
            sampling_params: `n` choices become `n` sequences, with seeds that follow each other.
            prompt_token_ids: of a prompt that is tokenised already; `prompt` is then only reported.
            arrival_time: when it came, by `time.perf_counter()`, if that was before now.
            cache_salt: only requests with the same one share blocks of the prefix cache.

        Raises:
            RequestError: it can never be served, or the id is taken; nothing has changed.
        """
        if request_id in self.output_processor.parents:
            raise RequestError(f"There is a request {request_id} already: give each its own id.", param="request_id")
        token_ids = self.validate(prompt if prompt_token_ids is None else prompt_token_ids, sampling_params)  # type: ignore[arg-type]
        seed = self._seeds.getrandbits(63) if sampling_params.seed is None else sampling_params.seed
        children = [
            Request(
                f"{request_id}/{index}",
                SamplingState.create(sampling_params, token_ids, self.eos_token_ids, seed=seed + index),
                cache_salt=cache_salt,
            )
            for index in range(sampling_params.n)
        ]
        for child in children[1:]:
            child.sampling.prompt_logprobs = None  # the first choice scores the prompt, for all: none is ahead of it
        text = prompt if isinstance(prompt, str) else None
        metrics = RequestMetrics(time.perf_counter() if arrival_time is None else arrival_time)
        parent = Parent(request_id, text, token_ids, metrics, set())
        try:
            self.output_processor.add(parent, children)
            children[0].forks = children[1:]
            self.scheduler.add(children[0])
            shown = None if text is None else text[:PROMPT_CHARS]
            for child in children:
                self.events.emit(
                    RequestQueued, child.request_id, request_id, len(token_ids), sampling_params.max_tokens, shown
                )
            self.events.flush()
        except BaseException:  # Ctrl-C, here and below: it may come at any line, and leaves nothing half-done behind
            self.abort_request(request_id)
            raise

    def abort_request(self, request_id: str) -> None:
        """End a request, wherever it is; one that has ended already, or never was, is no error."""
        try:
            aborted = self.output_processor.abort(request_id)
            self.scheduler.finish_requests(aborted)
            for child_id in aborted:
                self.events.emit(RequestAborted, child_id)
            self.events.flush()
        except BaseException:
            self.output_processor.abort(request_id)
            self._restart()
            raise

    def reset_prefix_cache(self) -> None:
        """Let no later request find what has been computed so far; those that run keep their blocks."""
        self.scheduler.block_manager.forget()
        self.events.flush()

    def has_unfinished_requests(self) -> bool:
        """Whether a step would have anything to do."""
        return self.scheduler.has_unfinished_requests()

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns the deltas of the requests that got a token. Without requests it does nothing.

        A step that is cut short, by an error or at any line by Ctrl-C, has not happened: the next one begins where it
        began.
        """
        before: Snapshot = []
        times = [time.perf_counter()]
        try:
            scheduled = self.scheduler.schedule()
            times.append(time.perf_counter())
            scheduled, sampled = self._run(scheduled)
            times.append(time.perf_counter())
            before = self.output_processor.snapshot(scheduled.requests_and_forks)
            tokens = {request_id: [token_id for token_id, _ in results] for request_id, results in sampled.items()}
            taken = self.scheduler.update(scheduled, tokens)
            if self.on_step is not None:
                self.on_step(scheduled)
            times.append(time.perf_counter())
            kept = {request_id: sampled[request_id][:num_tokens] for request_id, num_tokens in taken.items()}
            outputs = self.output_processor.process(scheduled, kept)
            if scheduled.requests or scheduled.preempted:
                if self.events.has_listeners:
                    emit_step(self.events, self.scheduler, self.num_steps, scheduled, taken, outputs, times)
                self.num_steps += 1
            self.events.flush()
            return outputs
        except BaseException:
            self.output_processor.rewind(before)
            self._restart()
            raise

    def _restart(self) -> None:
        """Let all that have not ended compute again: a verb was cut short, and nobody knows where."""
        self.scheduler.restart(self.output_processor.requests())
        self.events.reset()

    def _run(self, scheduled: SchedulerOutput) -> "tuple[SchedulerOutput, dict[str, Sampled]]":
        """Compute a step; returns what of it was computed, and the tokens.

        A step that fails may fail for one request alone, and nobody knows for which. So it is computed again, request
        by request: their blocks are taken, and writing the same keys and values twice does no harm. Whose part fails
        again ends, and the others have lost nothing but time.
        """
        self.step_time = time.perf_counter()
        try:
            return scheduled, self.model_runner.run(scheduled)
        except BaseException as error:
            if self.on_failure is None or not isinstance(error, Exception):
                raise
            logger.exception("A step of %d requests failed.", len(scheduled.requests))
            if len(scheduled.requests) == 1:
                self._fail(scheduled.requests[0], error)
                return scheduled.only([]), {}
        sampled: dict[str, Sampled] = {}
        for request in scheduled.requests:
            if request.status is not RequestStatus.RUNNING:  # another of its choices has failed, and it with it
                continue
            try:
                sampled |= self.model_runner.run(scheduled.only([request]))
            except Exception as error:
                logger.exception("Request %s failed.", request.request_id)
                self._fail(request, error)
        # A request that has failed took all of its choices with it, whether they were computed or not.
        return scheduled.only([r for r in scheduled.requests if r.status is RequestStatus.RUNNING]), sampled

    def _fail(self, request: Request, error: Exception) -> None:
        """End the caller's request that this one is a choice of."""
        request_id = self.output_processor.parent_id(request.request_id)
        self.abort_request(request_id)
        assert self.on_failure is not None
        self.on_failure(request_id, error)
