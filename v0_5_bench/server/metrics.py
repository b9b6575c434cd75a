"""Prometheus metrics, with vLLM's names and types where they mean the same, so that dashboards made for it work.

Names, labels and buckets are those of vLLM 0.32.0, `v1/metrics/loggers.py` · `PrometheusStatLogger` and
`v1/metrics/buckets.py`; the client library adds `_total` to counters. Gauges are read from the scheduler when somebody
asks. A request's latencies are those of its steps, whatever its number of choices. Knows the engine, no HTTP.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from common.outputs import RequestOutput

from ..engine import LLMEngine

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
ENDED = ("stop", "length", "abort", "error")  # the values of the label `finished_reason`


class Metrics:
    """One engine's metrics, in a registry of their own. It is the `Observer` of the `AsyncEngine`.

    Args:
        engine: its scheduler is read for the gauges.
        model_name: the label by which vLLM's dashboards tell models apart.
    """

    def __init__(self, engine: LLMEngine, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        scheduler, manager = engine.scheduler, engine.scheduler.block_manager
        self._gauge("num_requests_running", "Sequences that run.").set_function(lambda: len(scheduler.running))
        self._gauge("num_requests_waiting", "Sequences that wait.").set_function(lambda: len(scheduler.waiting))
        self._gauge("kv_cache_usage_perc", "Share of the KV blocks that are taken; 1 is all.").set_function(
            lambda: 1 - manager.num_free_blocks / manager.num_blocks
        )
        self._preemptions = self._counter("num_preemptions", "Preemptions of sequences.")
        engine.on_step = lambda scheduled: self._preemptions.inc(len(scheduled.preempted))
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that have been computed.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens that have been generated.")
        self._ttft = self._histogram("time_to_first_token", "From arrival to the first token.", TTFT_BUCKETS)
        self._itl = self._histogram("inter_token_latency", "Between two tokens.", ITL_BUCKETS)
        self._e2e = self._histogram("e2e_request_latency", "From arrival to the last token.", E2E_BUCKETS)
        success = Counter(
            "vllm:request_success", "Sequences that have ended.", [*self._labels, "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        self._ended = {reason: success.labels(**self._labels, finished_reason=reason) for reason in ENDED}

    def on_output(self, output: RequestOutput, seconds: float, is_first: bool) -> None:
        """A step has added to a request."""
        if is_first:
            self._ttft.observe(seconds)
            self._prompt_tokens.inc(len(output.prompt_token_ids))
        else:
            self._itl.observe(seconds)
        self._generation_tokens.inc(sum(len(choice.token_ids) for choice in output.outputs))
        for choice in output.outputs:
            if choice.finish_reason is not None:
                self._ended[choice.finish_reason].inc()
        if output.finished:
            self._e2e.observe(output.metrics.finished_time - output.metrics.arrival_time)

    def on_abort(self, num_choices: int, reason: str) -> None:
        """A request has ended without an answer."""
        self._ended[reason].inc(num_choices)

    def exposition(self) -> bytes:
        """All of them, in Prometheus's text format."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"vllm:{name}_seconds", text, list(self._labels), buckets=buckets, registry=self.registry
        ).labels(**self._labels)
