"""Where a step's time goes: `--profile`. Clocks around the parts of a running engine, and around nothing otherwise.

While a `Profiler` is entered, the functions that are a step's parts are replaced by ones that take the time; when it is
left, the engine is as it was, to the last attribute: switched off, it costs nothing, since it is not there. A part's
time is its own: what it calls is another part's. So the parts add up to the whole, and what nobody claims is `other`.

On a GPU, clocks would see only how long work is queued; there each clock waits for the card first, which makes the step
slower than it is. For a look inside, a trace for https://ui.perfetto.dev is written by PyTorch's own profiler.
"""

import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common import llama
from common.errors import ModelError

if TYPE_CHECKING:
    from ...engine import LLMEngine

SCHEDULING, INPUTS, LINEAR, ATTENTION = "scheduling", "input preparation", "linear layers", "attention"
ELEMENTWISE, SAMPLING, TEXT = "norms, rotary, activations", "sampling", "detokenising"
OTHER, BETWEEN = "other", "between steps"
PARTS = (SCHEDULING, INPUTS, LINEAR, ATTENTION, ELEMENTWISE, SAMPLING, TEXT, OTHER, BETWEEN)

TRACE_FROM, TRACE_STEPS = 5, 20  # steps that a trace shows: the first ones are not like the rest


class Profiler:
    """Takes the time of each part of an engine's steps, from entering to leaving it.

    Args:
        engine: `LLMEngine` of v0.3 or a later milestone.
        trace_file: where to write a trace of some steps; the clocks then take PyTorch's profiler into account, too.

    Raises:
        ModelError: there is no folder for the trace.
    """

    def __init__(self, engine: "LLMEngine", *, trace_file: str | None = None) -> None:
        if trace_file is not None and not Path(trace_file).absolute().parent.is_dir():
            raise ModelError(f"There is no folder for the trace: {trace_file}.")
        self.engine, self.trace_file = engine, trace_file
        self.parts = dict.fromkeys(PARTS, 0.0)  # seconds
        self.num_steps = self.num_outputs = 0
        self._now = _after_the_card if engine.model.device.type == "cuda" else time.perf_counter
        self._inner: list[float] = []  # for each call under way, the seconds of the parts that it has called
        self._left: float | None = None  # when the last step ended, if another has to follow
        self._undo = ExitStack()
        self._trace: Any = None

    def __enter__(self) -> "Profiler":
        engine = self.engine
        runner = engine.model_runner
        with self._undo:  # if one of them is not there, the others are put back
            self._replace(engine, "step", lambda step: lambda: self._step(step))
            self._replace(engine, "abort_request", self._aborting)
            for owner, name, part in (
                (engine.scheduler, "schedule", SCHEDULING),
                (engine.scheduler, "update", SCHEDULING),
                (runner, "run", INPUTS),
                (runner.kv_cache, "begin_step", INPUTS),
                (engine.model, "forward", ELEMENTWISE),
                *self._products(),
                (runner.kv_cache, "attend", ATTENTION),
                (sys.modules[type(runner).__module__], "sample", SAMPLING),
                (engine.output_processor, "process", TEXT),
            ):
                self._replace(owner, name, partial(self._timed, part))
            self._undo = self._undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        self._end_trace()

    def summary(self) -> dict[str, Any]:
        """Milliseconds a step of each part and of all together, and how many steps and outputs there were."""
        num = max(self.num_steps, 1)
        return {
            "num_steps": self.num_steps,
            "outputs_per_step": self.num_outputs / num,
            "ms_per_step": sum(self.parts.values()) * 1e3 / num,
            "parts_ms": {part: seconds * 1e3 / num for part, seconds in self.parts.items()},
        }

    def _products(self) -> list[tuple[Any, str, str]]:
        """Who multiplies with matrices: PyTorch, and from v0.9 on the kernels in C, where the model has them."""
        kernels = getattr(self.engine.model, "kernels", None)
        return [(llama, "linear", LINEAR), *([] if kernels is None else [(kernels, "product", LINEAR)])]

    def _replace(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put a wrapped function in the place of `owner.name`, until this profiler is left."""
        original, was_own = getattr(owner, name), name in vars(owner)
        setattr(owner, name, wrap(original))
        if was_own:
            self._undo.callback(setattr, owner, name, original)
        else:  # a method, found in the class again
            self._undo.callback(delattr, owner, name)

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        now, inner, parts = self._now, self._inner, self.parts

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = now()
            inner.append(0.0)
            try:
                if self._trace is None:
                    return function(*args, **kwargs)
                with torch.profiler.record_function(part):
                    return function(*args, **kwargs)
            finally:
                seconds = now() - begin
                parts[part] += seconds - inner.pop()
                if inner:
                    inner[-1] += seconds

        return call

    def _step(self, step: Callable[[], Any]) -> Any:
        if not self.engine.has_unfinished_requests():
            return step()  # there is nothing to do, as when a server's engine has only been woken
        if self._left is not None:
            self.parts[BETWEEN] += time.perf_counter() - self._left
            self._left = None  # also if this step fails: its seconds are in its parts
        if self.trace_file is not None and self._trace is None and self.num_steps == TRACE_FROM:
            self._trace = torch.profiler.profile()
            self._trace.__enter__()
        outputs = self._timed(OTHER, step)()
        self.num_steps += 1
        self.num_outputs += len(outputs)
        if self.num_steps == TRACE_FROM + TRACE_STEPS:
            self._end_trace()
        self._left = time.perf_counter() if self.engine.has_unfinished_requests() else None
        return outputs

    def _aborting(self, abort: Callable[[str], None]) -> Callable[[str], None]:
        def call(request_id: str) -> None:
            abort(request_id)
            if not self.engine.has_unfinished_requests():
                self._left = None  # from here on nobody waits for a step

        return call

    def _end_trace(self) -> None:
        if self._trace is not None:
            trace, self._trace = self._trace, None
            trace.__exit__(None, None, None)
            trace.export_chrome_trace(self.trace_file)


@contextmanager
def kernels_as_operators(engine: "LLMEngine") -> Iterator[None]:
    """Let PyTorch's profiler see the kernels in C that v0.9 calls, as `kernels::product` and the like.

    They are no operators of PyTorch: it would count their time as spent outside of all operators.
    """
    kernels = getattr(engine.model, "kernels", None)

    def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(f"kernels::{name}"):
                return function(*args, **kwargs)

        return call

    with ExitStack() as undo:
        for name, _ in inspect.getmembers(type(kernels), inspect.isfunction):
            if not name.startswith("_"):
                setattr(kernels, name, named(name, getattr(kernels, name)))
                undo.callback(delattr, kernels, name)
        yield


def _after_the_card() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()
