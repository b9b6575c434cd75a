"""The bridge between the event loop and the engine's thread, without HTTP."""

import asyncio
import contextlib
import functools
import threading
import time

import pytest

from common.errors import RequestError
from common.outputs import RequestMetrics, RequestOutput
from common.sampling_params import SamplingParams
from tests.kit.memory import Watched, without_garbage_collector
from tests.kit.models import Successor
from tests.kit.server import Gate
from tests.kit.tokenizers import byte_tokenizer
from v0_4_http import LLMEngine
from v0_4_http.async_engine import AsyncEngine, EngineDeadError, RequestFailedError, RequestStream, UnavailableError


class Recorder:
    """An observer that keeps what it is told, and checks that it is told on the event loop."""

    def __init__(self):
        self.outputs, self.aborts = [], []
        self.thread = threading.current_thread()

    def on_output(self, output, seconds, is_first):
        assert threading.current_thread() is self.thread
        assert seconds >= 0
        self.outputs.append((output.request_id, is_first, output.finished))

    def on_abort(self, _request_id, num_choices, reason):
        assert threading.current_thread() is self.thread
        self.aborts.append((num_choices, reason))


@contextlib.asynccontextmanager
async def bridge(model=None, *, steps=(), max_queued_requests=100, **options):
    """A started `AsyncEngine` with its recorder and its gate; at the end the engine must be idle, the threads gone."""
    engine = LLMEngine(
        model or Successor(), tokenizer=byte_tokenizer(), **{"num_blocks": 100, "block_size": 4} | options
    )
    bridge = AsyncEngine(engine, max_queued_requests=max_queued_requests, observer=Recorder())
    bridge.start()
    try:
        with Gate(engine, *steps) as gate:
            yield bridge, bridge.observer, gate
            if bridge.is_alive:
                await idle(engine)
    finally:
        await asyncio.wait_for(bridge.shutdown(0), 20)
    assert not {"engine", "tokenizer_0"} & {thread.name for thread in threading.enumerate()}


async def idle(engine):
    manager = engine.scheduler.block_manager
    async with asyncio.timeout(20):
        while engine.has_unfinished_requests() or manager.num_free_blocks < manager.num_blocks:
            await asyncio.sleep(0.002)
    assert not engine.output_processor.parents
    engine.scheduler.check_integrity()


def greedy(max_tokens=4, **params):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **params)


def ids(*texts):
    return [(text, list(text.encode())) for text in texts]


async def read(stream, texts=None):
    """What a stream says: one text for each prompt and choice, by `(prompt, choice)`."""
    texts = {} if texts is None else texts
    async with asyncio.timeout(20):
        async for prompt, output in stream:
            for delta in output.outputs:
                texts[prompt, delta.index] = texts.get((prompt, delta.index), "") + delta.text
    return texts


async def has_done(engine, event):
    """Wait until the engine's thread has set an event, and no longer than it lives."""
    async with asyncio.timeout(20):
        while not event.is_set():
            assert engine._thread.is_alive(), "the engine's thread has ended"
            await asyncio.sleep(0.002)


async def reached(gate, step):
    """Without standing in the event loop's way."""
    await asyncio.to_thread(gate.reached, step)


def run(function):
    """Have pytest run a coroutine function."""

    @functools.wraps(function)
    def test(**arguments):
        asyncio.run(function(**arguments))

    return test


def output(request_id, finished=False):
    return RequestOutput(request_id, None, [1], [], finished, RequestMetrics(0.0))


@run
async def test_a_stream_hands_its_reader_what_was_put_and_ends_with_the_last_of_its_prompts():
    stream = RequestStream(2, None, abort=lambda _: None)
    put = [(0, output("A-0")), (1, output("A-1", True)), (0, output("A-0", True))]
    for index, each in put:
        stream.put(index, each, 1.0)
    async with asyncio.timeout(20):
        assert [item async for item in stream] == put


@run
async def test_a_stream_raises_an_error_after_what_was_put_before_it():
    stream = RequestStream(1, None, abort=lambda _: None)
    stream.put(0, output("A-0"), 1.0)
    stream.fail(UnavailableError("cut short"))
    items = aiter(stream)
    async with asyncio.timeout(20):
        assert (await anext(items))[0] == 0
        with pytest.raises(UnavailableError, match="cut short"):
            await anext(items)


@run
async def test_commands_are_run_in_their_order_by_the_engines_thread_also_when_it_sleeps():
    async with bridge() as (engine, _, _):
        ran, done = [], threading.Event()
        for number in range(3):
            engine.call_soon(lambda number=number: ran.append((number, threading.current_thread().name)))
        engine.call_soon(done.set)
        await has_done(engine, done)
        assert ran == [(number, "engine") for number in range(3)]


@run
async def test_the_engines_thread_steps_while_there_is_something_to_compute_and_then_waits():
    model = Successor()
    async with bridge(model) as (engine, _, _):
        added = threading.Event()
        engine.call_soon(lambda: engine.engine.add_request("A", "a", greedy(5)) or added.set())
        await has_done(engine, added)
        await idle(engine.engine)
        assert model.num_forwards == 5


@run
async def test_outputs_come_in_order_and_the_observer_is_told_of_each():
    async with bridge() as (engine, seen, _):
        before = time.perf_counter()
        stream = engine.submit("A", ids("a"), greedy(3))
        assert await read(stream) == {(0, 0): "bcd"}
        assert seen.outputs == [("A-0", True, False), ("A-0", False, False), ("A-0", False, True)]
        assert before <= stream.arrival_time < stream.first_time < stream.last_time <= time.perf_counter()
        stream.close()  # too late: it has ended
        assert seen.aborts == []


@run
async def test_many_streams_at_once_each_get_their_own_tokens():
    async with bridge(num_blocks=12, max_num_batched_tokens=16, max_num_seqs=8) as (engine, seen, _):
        texts = [chr(ord("a") + number) for number in range(12)]
        streams = [engine.submit(text, ids(text), greedy(12)) for text in texts]
        answers = await asyncio.gather(*map(read, streams))
        expected = [bytes((ord(text) + i) % 128 for i in range(1, 13)).decode() for text in texts]
        assert [answer[0, 0] for answer in answers] == expected
        assert sum(is_first for _, is_first, _ in seen.outputs) == sum(ended for *_, ended in seen.outputs) == 12


@run
async def test_one_stream_of_several_prompts_and_choices():
    async with bridge() as (engine, _, _):
        stream = engine.submit("A", ids("a", "A", "0"), greedy(3, n=2))
        expected = {"a": "bcd", "A": "BCD", "0": "123"}.values()
        assert await read(stream) == {(p, c): text for p, text in enumerate(expected) for c in range(2)}


@run
async def test_of_several_prompts_all_are_taken_or_none():
    async with bridge(max_model_len=16) as (engine, seen, _):
        with pytest.raises(RequestError, match="prompt has 20 tokens"):
            engine.submit("A", ids("a", "x" * 20), greedy())
        assert engine.num_waiting == 0
        assert not engine.engine.has_unfinished_requests()
        await read(engine.submit("A", ids("a"), greedy()))  # nor is the name taken
        assert [request_id for request_id, *_ in seen.outputs] == ["A-0"] * 4


@run
async def test_the_queue_counts_sequences_from_the_moment_they_are_submitted():
    async with bridge(steps=[2], max_queued_requests=4, max_num_seqs=1) as (engine, seen, gate):
        first = engine.submit("A", ids("a"), greedy())
        await reached(gate, 2)
        assert engine.num_waiting == 0  # it runs
        others = [engine.submit("B", ids("A", "0"), greedy()), engine.submit("C", ids("A"), greedy())]
        assert engine.num_waiting == 3
        for prompts, n in ((["x", "y"], 1), (["x"], 2)):
            with pytest.raises(UnavailableError, match="3 sequences wait, 2 more were asked for, and at most 4"):
                engine.submit("D", ids(*prompts), greedy(n=n))
        others.append(engine.submit("D", ids("x"), greedy()))
        gate.go(2)
        answers = await asyncio.gather(*map(read, [first, *others]))
        assert [len(answer) for answer in answers] == [1, 2, 1, 1]
        await read(engine.submit("E", ids("x", "y", "z"), greedy()))
        assert seen.aborts == []


@run
async def test_the_queue_counts_nobody_twice_while_the_engine_takes_him_in():
    taken, go_on = threading.Event(), threading.Event()
    async with bridge(steps=[1]) as (engine, _, gate):
        add_request = engine.engine.add_request

        def slow_add(*arguments, **keywords):
            add_request(*arguments, **keywords)
            taken.set()
            assert go_on.wait(20)

        engine.engine.add_request = slow_add
        stream = engine.submit("A", ids("a"), greedy())
        assert await asyncio.to_thread(taken.wait, 20)
        reading = asyncio.ensure_future(asyncio.to_thread(lambda: engine.num_waiting))
        await asyncio.wait([reading], timeout=0.2)  # it may wait for its turn
        go_on.set()
        assert await reading == 1
        gate.go(1)
        await read(stream)


@run
async def test_a_closed_stream_is_aborted_wherever_it_is_and_only_once():
    model = Successor()
    async with bridge(model, steps=[1, 3], max_num_seqs=1) as (engine, seen, gate):
        submitted = engine.submit("A", ids("x", "y"), greedy(50, n=2))
        submitted.close()  # perhaps before the engine has heard of it
        assert seen.aborts == [(2, "abort")] * 2
        running, waiting, kept = (engine.submit(text, ids(text), greedy(50)) for text in "aA0")
        gate.go(1)
        await reached(gate, 3)
        for stream in (running, waiting, running):
            stream.close()
        assert seen.aborts == [(2, "abort")] * 2 + [(1, "abort")] * 2
        num_outputs = len(seen.outputs)
        gate.go(3)
        assert await read(kept) == {(0, 0): bytes(range(49, 99)).decode()}
        # The step that was under way counts for nobody, and none comes after it.
        assert {request_id for request_id, *_ in seen.outputs[num_outputs:]} == {"0-0"}
        assert model.num_forwards <= 3 + 50


@run
async def test_a_failure_comes_after_the_outputs_before_it_and_takes_the_other_prompts_with_it():
    async with bridge(Successor(poison="z"), steps=[1]) as (engine, seen, gate):
        streams = [engine.submit("A", ids("a"), greedy(8)), engine.submit("X", ids("w", "0"), greedy(8, n=2))]
        gate.go(1)
        texts = {}
        with pytest.raises(RequestFailedError, match=r"^The model failed on this request \(RuntimeError\)\.$"):
            await read(streams[1], texts)
        assert {texts[0, choice] for choice in range(2)} == {"xyz"}
        assert await read(streams[0]) == {(0, 0): "bcdefghi"}
        assert seen.aborts == [(2, "error"), (2, "abort")]
        assert await read(engine.submit("X", ids("a"), greedy(2))) == {(0, 0): "bc"}


@run
async def test_a_fault_that_does_not_come_again_is_not_seen():
    async with bridge(Successor(fails_at=(2,))) as (engine, seen, _):
        stream = engine.submit("A", ids("a", "A"), greedy(4))
        assert await read(stream) == {(0, 0): "bcde", (1, 0): "BCDE"}
        assert seen.aborts == []


@pytest.mark.parametrize("broken", ["schedule", "add_request", "abort_request"])
@run
async def test_when_the_loop_dies_all_streams_end_and_nothing_new_is_taken(monkeypatch, broken):
    def fail(*_, **__):
        raise SystemExit("worse than an Exception")

    async with bridge(steps=[3], max_num_seqs=1) as (engine, seen, gate):
        streams = [engine.submit("A", ids("a"), greedy(50)), engine.submit("B", ids("A", "0"), greedy(50, n=2))]
        leaving = engine.submit("C", ids("x"), greedy(50))
        await reached(gate, 3)
        monkeypatch.setattr(engine.engine.scheduler if broken == "schedule" else engine.engine, broken, fail)
        if broken == "add_request":
            streams.append(engine.submit("D", ids("y"), greedy(50)))
        leaving.close()
        gate.go(3)
        for stream in streams:
            with pytest.raises(EngineDeadError):
                await read(stream)
            stream.close()
        assert not engine.is_alive
        with pytest.raises(EngineDeadError):
            engine.check_available(0)
        with pytest.raises(EngineDeadError):
            engine.submit("E", ids("a"), greedy())
        num_others = len(streams) - 2
        assert seen.aborts == [(1, "abort"), (1, "error"), (2, "error"), (2, "error"), *[(1, "error")] * num_others]


@run
async def test_shutdown_waits_for_what_runs_and_takes_nothing_new():
    async with bridge(steps=[3]) as (engine, seen, gate):
        stream = engine.submit("A", ids("a"), greedy(6))
        await reached(gate, 3)
        ended = asyncio.ensure_future(engine.shutdown(20))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="shutting down"):
            engine.submit("B", ids("A"), greedy())
        gate.go(3)
        assert await read(stream) == {(0, 0): "bcdefg"}
        await asyncio.wait_for(ended, 20)
        assert seen.aborts == []


@pytest.mark.parametrize("timeout", [0, 0.05])
@run
async def test_shutdown_cuts_short_what_has_not_ended_in_time(timeout):
    async with bridge(steps=[3], max_num_seqs=2) as (engine, seen, gate):
        streams = [engine.submit("A", ids("a", "A"), greedy(50)), engine.submit("B", ids("0"), greedy(50))]
        await reached(gate, 3)
        ended = asyncio.ensure_future(engine.shutdown(timeout))
        texts = {}
        for stream in streams:
            with pytest.raises(UnavailableError, match="cut short"):
                await read(stream, texts)
        assert texts == {(0, 0): "bc", (1, 0): "BC"}
        assert not ended.done()  # the step has not come back
        gate.go(3)
        await asyncio.wait_for(ended, 20)
        assert seen.aborts == [(1, "abort")] * 3
        with pytest.raises(UnavailableError, match="shutting down"):
            engine.submit("C", ids("a"), greedy())


@run
async def test_shutdown_of_an_idle_engine_is_quick_and_may_come_twice():
    async with bridge() as (engine, _, _):
        await read(engine.submit("A", ids("a"), greedy()))
        for timeout in (600, 600, 0):
            await asyncio.wait_for(engine.shutdown(timeout), 20)


@run
async def test_what_is_tokenised_during_and_after_a_shutdown_is_refused_and_no_fault():
    async with bridge() as (engine, _, _):
        await engine.shutdown(0)
        with pytest.raises(UnavailableError, match="shutting down"):
            await engine.tokenize(len, "abc")


@run
async def test_tokenising_has_one_thread_of_its_own_and_gives_its_errors_back():
    def refuse(_):
        raise RequestError("no such text")

    async with bridge(steps=[1]) as (engine, _, gate):
        stream = engine.submit("A", ids("a"), greedy())
        await reached(gate, 1)  # the engine's thread is busy: neither tokenising nor the loop wait for it
        threads = await asyncio.gather(*(engine.tokenize(threading.current_thread) for _ in range(8)))
        assert {thread.name for thread in threads} == {"tokenizer_0"}
        with pytest.raises(RequestError, match="no such text"):
            await engine.tokenize(refuse, "a")
        gate.go(1)
        assert await read(stream) == {(0, 0): "bcde"}


@run
async def test_a_tokenizer_at_work_does_not_hold_up_a_shutdown():
    async with bridge() as (engine, _, _):
        released = threading.Event()
        job = asyncio.ensure_future(engine.tokenize(released.wait, 2))
        ended = asyncio.ensure_future(engine.shutdown(0))
        await asyncio.wait([ended], timeout=0.2)
        released.set()
        assert await job, "the event loop has been blocked"
        await asyncio.wait_for(ended, 20)


def test_an_engine_whose_bridge_is_gone_is_freed_at_once_also_after_a_step_has_failed():
    watched = []

    async def main():
        async with bridge(Watched(watched)) as (engine, _, _):
            with pytest.raises(RequestFailedError):
                await read(engine.submit("A", ids("z"), greedy()))
            assert await read(engine.submit("B", ids("a"), greedy())) == {(0, 0): "bcde"}

    with without_garbage_collector():
        asyncio.run(main())
        assert [what for what, is_there in watched if is_there() is not None] == []
    assert "kv_cache" in dict(watched)
