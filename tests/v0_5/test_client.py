"""The load generator: what is counted as a token and a latency, whatever a server's stream looks like."""

import asyncio
import contextlib
import json
import threading

import pytest

from v0_5_bench.harness.load.client import Load, RequestResult, arrival_moments, run_load
from v0_5_bench.harness.load.summary import percentiles, summarise, tables
from v0_5_bench.harness.load.workloads import BenchRequest


def result(chunk_times, num_output_tokens, start=0.0, end=None, **fields):
    end = chunk_times[-1] if end is None and chunk_times else end
    return RequestResult(
        start=start, end=end or 0.0, chunk_times=chunk_times, num_output_tokens=num_output_tokens, **fields
    )


def test_ben_1_times_are_by_token_where_a_chunk_holds_several():
    """Three tokens a chunk, every 30 ms: 10 ms a token, not 30."""
    times = [0.2 + 0.03 * i for i in range(11)]  # 1 + 10 x 3 tokens
    several = result(times, 31)
    assert several.tpot == pytest.approx(0.010)
    assert list(several.itls) == pytest.approx([0.010] * 10)
    assert several.ttft == pytest.approx(0.2)


def test_ben_1_an_answer_of_one_token_has_no_time_per_token():
    one = result([0.2], 1)
    assert one.tpot is None
    assert list(one.itls) == []
    summary = summarise([one, result([0.1, 0.2, 0.3], 3)])
    assert summary["tpot_ms"]["mean"] == pytest.approx(100.0)
    assert summary["output_tokens"] == 4


def test_ben_2_the_first_token_is_in_no_gap():
    steady = result([0.2 + 0.01 * i for i in range(5)], 5)
    assert len(list(steady.itls)) == 4
    assert max(steady.itls) == pytest.approx(0.01)


def test_percentiles_are_by_nearest_rank():
    values = [i / 1000 for i in range(1, 101)]
    assert percentiles(values) == pytest.approx({"mean": 50.5, "median": 50.5, "p90": 90.0, "p99": 99.0})
    assert percentiles([0.007]) == pytest.approx(dict.fromkeys(("mean", "median", "p90", "p99"), 7.0))
    assert percentiles([]) is None


def test_ben_6_failed_requests_are_counted_apart_and_are_in_no_figure():
    good = result([1.0, 2.0], 2, end=2.0, num_prompt_tokens=3)
    bad = RequestResult(start=0.0, end=0.001, error="HTTP 503: full")
    summary = summarise([bad, good, bad])
    assert (summary["completed"], summary["failed"], summary["errors"]) == (1, 2, {"HTTP 503: full": 2})
    assert summary["requests_per_s"] == pytest.approx(0.5)
    assert summary["output_tokens_per_s"] == pytest.approx(1.0)
    assert summary["e2el_ms"]["mean"] == pytest.approx(2000.0)
    assert summarise([bad])["completed"] == 0
    assert len(tables(summarise([bad]), "t")) == 1


def test_requests_of_an_open_loop_come_at_the_same_random_moments_for_a_seed():
    load = Load(base_url="", model="", request_rate=10.0, seed=3)
    moments = arrival_moments(2000, load)
    assert moments == arrival_moments(2000, load)
    assert moments[0] == 0.0
    assert moments == sorted(moments)
    assert 180 < moments[-1] < 220  # 2,000 at 10 a second
    assert arrival_moments(3, Load(base_url="", model="", concurrency=1)) == [0.0] * 3


class Mock:
    """A server that answers every request with the bytes it is told, and counts how many are under way."""

    def __init__(self, body, status="200 OK", hold=None):
        self.body, self.status, self.hold = body, status, hold
        self.requests, self.now, self.most = [], 0, 0

    async def answer(self, reader, writer):
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            self.requests.append((head.split(b" ")[1].decode(), json.loads(await reader.readexactly(length))))
            self.now += 1
            self.most = max(self.most, self.now)
            if self.hold is not None:
                await self.hold(self)
            self.now -= 1
            writer.write(f"HTTP/1.1 {self.status}\r\nContent-Length: {len(self.body)}\r\n\r\n".encode() + self.body)
            await writer.drain()


@contextlib.contextmanager
def serving(mock):
    loop, started = asyncio.new_event_loop(), threading.Event()

    async def answer(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await mock.answer(reader, writer)
        writer.close()

    async def start():
        mock.server = await asyncio.start_server(answer, "127.0.0.1", 0)
        mock.url = f"http://127.0.0.1:{mock.server.sockets[0].getsockname()[1]}"
        started.set()

    thread = threading.Thread(target=lambda: (loop.run_until_complete(start()), loop.run_forever()), daemon=True)
    thread.start()
    assert started.wait(20)
    yield mock
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)


def stream(*events):
    return b"".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode() for event in events)


def text(content, **extra):
    return {"choices": [{"index": 0, "text": content}]} | extra


USAGE = {"prompt_tokens": 7, "completion_tokens": 100, "total_tokens": 107}
REQUEST = BenchRequest(100, prompt=[1, 2, 3])


def load_mock(mock, requests, **fields):
    with serving(mock):
        return asyncio.run(run_load(Load(base_url=mock.url, model="m", **fields), requests))


def test_ben_3_tokens_are_the_servers_count_in_a_chunk_of_its_own_or_beside_choices():
    spaces = [text(" " * 25) for _ in range(4)]
    for events in (
        [*spaces, {"choices": [], "usage": USAGE}, "[DONE]"],
        [*spaces[:3], text(" " * 25, usage=USAGE), "[DONE]"],
        [*(s | {"usage": USAGE | {"completion_tokens": 25 * i}} for i, s in enumerate(spaces, 1)), "[DONE]"],
    ):
        [one] = load_mock(Mock(stream(*events)), [REQUEST])
        assert one.error is None
        assert (one.num_prompt_tokens, one.num_output_tokens, len(one.chunk_times)) == (7, 100, 4)


def test_ben_2_a_chunk_with_the_role_is_not_the_first_token():
    chat = BenchRequest(5, messages=[{"role": "user", "content": "Hi"}])
    events = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"index": 0, "delta": {"content": "a"}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": USAGE},
        "[DONE]",
    ]
    mock = Mock(stream(*events))
    [one] = load_mock(mock, [chat])
    assert len(one.chunk_times) == 1
    [(path, body)] = mock.requests
    assert path == "/v1/chat/completions"
    assert body["messages"] == chat.messages
    assert (body["max_completion_tokens"], body["ignore_eos"], body["temperature"]) == (5, True, 0.0)
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("mock", "error"),
    [
        (
            Mock(b'{"error": {"message": "full"}}', "503 Service Unavailable"),
            'HTTP 503: {"error": {"message": "full"}}',
        ),
        (Mock(stream(text("a"), {"error": {"message": "the model failed"}}, "[DONE]")), "the model failed"),
        (Mock(stream(text("a"), {"choices": [], "usage": USAGE})), "the stream ended before [DONE]"),
        (Mock(stream({"choices": [], "usage": USAGE}, "[DONE]")), "no text came"),
        (Mock(stream(text("a"), "[DONE]")), "the server did not say how many tokens it generated (usage)"),
        (Mock(b"data: {broken\n\n"), "JSONDecodeError"),
        (Mock(stream(text("a"), {"error": "boom"}, "[DONE]")), "boom"),
        (Mock(b"data: null\n\n"), "a chunk of the stream is not OpenAI's"),
        (Mock(stream(text("a"), {"usage": {"total_tokens": 3}})), "a chunk of the stream is not OpenAI's"),
    ],
)
def test_an_answer_that_is_no_whole_answer_is_a_failure_with_its_reason(mock, error):
    results = load_mock(mock, [REQUEST, REQUEST])
    assert [error in one.error for one in results] == [True, True]


def test_a_server_that_is_not_there_is_a_failure_of_each_request():
    results = asyncio.run(run_load(Load(base_url="http://127.0.0.1:9", model="m"), [REQUEST] * 3))
    assert all("ClientConnector" in one.error for one in results)


@pytest.mark.parametrize(("concurrency", "most"), [(3, 3), (None, 12)])
def test_so_many_requests_are_under_way_as_asked_and_without_a_number_all(concurrency, most):
    async def until_full(mock):
        for _ in range(2000):
            if mock.most == most or len(mock.requests) == 12:
                return
            await asyncio.sleep(0.005)

    mock = Mock(stream(text("a"), {"choices": [], "usage": USAGE}, "[DONE]"), hold=until_full)
    results = load_mock(mock, [REQUEST] * 12, concurrency=concurrency)
    assert [one.error for one in results] == [None] * 12
    assert mock.most == most
    assert mock.requests[0][1]["max_tokens"] == 100
