"""Prometheus metrics, with vLLM's names and types where they mean the same, so that dashboards made for it work.

Names, labels and buckets are those of vLLM 0.32.0, `v1/metrics/loggers.py` · `PrometheusStatLogger` and
`v1/metrics/buckets.py`; the client library adds `_total` to counters. Gauges are read from the scheduler when somebody
asks. A request's latencies are those of its steps, whatever its number of choices. Knows the engine, no HTTP.
"""

import collections
import weakref

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from common.outputs import RequestOutput

from ..engine import LLMEngine
from ..scheduler import SchedulerOutput

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
E2E_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
REQUEST_TIMES = {
    "request_queue_time": "From arrival to the first step.",
    "request_prefill_time": "From the first step to the first token.",
    "request_decode_time": "From the first token to the last.",
    "request_inference_time": "From the first step to the last token.",
}
ENDED = ("stop", "length", "abort", "error")  # the values of the label `finished_reason`


def request_tokens_buckets(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to the context."""
    series = (digit * 10**exponent for exponent in range(len(str(max_model_len))) for digit in (1, 2, 5))
    return tuple(bucket for bucket in series if bucket <= max_model_len)


class Metrics:
    """One engine's metrics, in a registry of their own. It is the `Observer` of the `AsyncEngine`.

    Args:
        engine: its scheduler is read for the gauges.
        model_name: the label by which vLLM's dashboards tell models apart.
    """

    def __init__(self, engine: LLMEngine, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._engine = weakref.proxy(engine)  # which holds this by `on_step`: a circle would keep its memory
        self._num_tokens: dict[
            str, collections.Counter[int]
        ] = {}  # of each request that runs: the tokens of its choices
        scheduler, manager = engine.scheduler, engine.scheduler.block_manager
        self._gauge("num_requests_running", "Sequences that run.").set_function(lambda: len(scheduler.running))
        self._gauge("num_requests_waiting", "Sequences that wait.").set_function(lambda: scheduler.num_waiting)
        self._gauge("kv_cache_usage_perc", "Share of the KV blocks that somebody owns; 1 is all.").set_function(
            lambda: 1 - manager.num_free_blocks / manager.num_blocks
        )
        self._preemptions = self._counter("num_preemptions", "Preemptions of sequences.")
        self._drafts = self._counter("spec_decode_num_drafts", "Times that tokens were drafted for a sequence.")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Tokens that were drafted.")
        self._accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that were right.")
        per_place = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were right, by their place in the draft.",
            [*self._labels, "position"],
            registry=self.registry,
        )
        places = range(engine.scheduler.num_speculative_tokens)
        self._accepted_at = [per_place.labels(**self._labels, position=str(place)) for place in places]
        engine.on_step = self._on_step
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that have been answered.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Those of them that the prefix cache had.")
        self._queries = self._counter("prefix_cache_queries", "Tokens that were looked for in the prefix cache.")
        self._hits = self._counter("prefix_cache_hits", "Tokens that were found there.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens that have been generated.")
        self._ttft = self._histogram("time_to_first_token", "From arrival to the first token.", TTFT_BUCKETS)
        self._itl = self._histogram("inter_token_latency", "Between two tokens.", ITL_BUCKETS)
        self._e2e = self._histogram("e2e_request_latency", "From arrival to the last token.", E2E_BUCKETS)
        self._tpot = self._histogram(
            "request_time_per_output_token", "Of a request: its decode time over its tokens but the first.", ITL_BUCKETS
        )
        self._times = {name: self._histogram(name, text, E2E_BUCKETS) for name, text in REQUEST_TIMES.items()}
        tokens = {
            "request_prompt_tokens": "Tokens of a request's prompt.",
            "request_generation_tokens": "Tokens of one of its answers.",
            "request_max_num_generation_tokens": "Tokens of its longest answer.",
        }
        buckets = request_tokens_buckets(engine.max_model_len)
        self._tokens = {name: self._histogram(name, text, buckets, unit="") for name, text in tokens.items()}
        config = {
            "block_size": str(manager.block_size),
            "num_gpu_blocks": str(manager.num_blocks),  # on a CPU, too: the name is vLLM's
            "cache_dtype": str(engine.model.dtype).removeprefix("torch."),
            "enable_prefix_caching": str(manager.enable_prefix_caching),
        }
        info = Gauge("vllm:cache_config_info", "The KV cache.", [*self._labels, *config], registry=self.registry)
        info.labels(**self._labels, **config).set(1)
        success = Counter(
            "vllm:request_success", "Sequences that have ended.", [*self._labels, "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        self._ended = {reason: success.labels(**self._labels, finished_reason=reason) for reason in ENDED}

    def on_output(self, output: RequestOutput, seconds: float, is_first: bool) -> None:
        """A step has added to a request."""
        if is_first:
            if any(choice.token_ids for choice in output.outputs):  # with `max_tokens: 0` there is none
                self._ttft.observe(seconds)
            self._prompt_tokens.inc(len(output.prompt_token_ids))
            self._cached_tokens.inc(output.num_cached_tokens)
        else:
            self._itl.observe(seconds)
        self._generation_tokens.inc(sum(len(choice.token_ids) for choice in output.outputs))
        num_tokens = self._num_tokens.setdefault(output.request_id, collections.Counter())
        for choice in output.outputs:
            num_tokens[choice.index] += len(choice.token_ids)
            if choice.finish_reason is not None:
                self._ended[choice.finish_reason].inc()
        if output.finished:
            self._on_finished(output, list(self._num_tokens.pop(output.request_id).values()))

    def on_abort(self, request_id: str, num_choices: int, reason: str) -> None:
        """A request has ended without an answer."""
        self._ended[reason].inc(num_choices)
        self._num_tokens.pop(request_id, None)

    def _on_finished(self, output: RequestOutput, num_tokens: list[int]) -> None:
        """Observe a request as a whole; all of vLLM's times are between these four moments."""
        m = output.metrics
        self._e2e.observe(m.finished_time - m.arrival_time)
        self._times["request_queue_time"].observe(m.scheduled_time - m.arrival_time)
        self._times["request_prefill_time"].observe(m.first_token_time - m.scheduled_time)
        self._times["request_decode_time"].observe(m.finished_time - m.first_token_time)
        self._times["request_inference_time"].observe(m.finished_time - m.scheduled_time)
        self._tpot.observe((m.finished_time - m.first_token_time) / max(1, max(num_tokens) - 1))
        self._tokens["request_prompt_tokens"].observe(len(output.prompt_token_ids))
        for num in num_tokens:
            self._tokens["request_generation_tokens"].observe(num)
        self._tokens["request_max_num_generation_tokens"].observe(max(num_tokens))

    def _on_step(self, scheduled: SchedulerOutput) -> None:
        """In the engine's thread, before the step's outputs are made: note whose first step it was."""
        self._preemptions.inc(len(scheduled.preempted))
        for num_drafts in filter(None, scheduled.num_draft_tokens):
            self._drafts.inc()
            self._draft_tokens.inc(num_drafts)
        for num_accepted in scheduled.num_accepted_tokens.values():
            self._accepted_tokens.inc(num_accepted)
            for counter in self._accepted_at[:num_accepted]:
                counter.inc()
        processor, manager = self._engine.output_processor, self._engine.scheduler.block_manager
        for request in scheduled.requests:
            if request.request_id not in scheduled.num_cached_tokens or request.num_preemptions > 0:
                continue
            self._hits.inc(scheduled.num_cached_tokens[request.request_id])
            metrics = processor.parents[processor.parent_id(request.request_id)].metrics
            if not metrics.scheduled_time:
                metrics.scheduled_time = self._engine.step_time
                self._queries.inc(request.num_prompt_tokens if manager.enable_prefix_caching else 0)

    def exposition(self) -> bytes:
        """All of them, in Prometheus's text format."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], unit: str = "_seconds") -> Histogram:
        return Histogram(
            f"vllm:{name}{unit}", text, list(self._labels), buckets=buckets, registry=self.registry
        ).labels(**self._labels)
