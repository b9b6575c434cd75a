"""Joined answers: what was put comes where it belongs, whoever leaves or fails, and nothing stays behind."""

import asyncio
import contextlib
import contextvars
import functools

import pytest

from tests.kit.models import Successor
from tests.kit.server import bodies, wait_until
from tests.v0_10.kit import ingress as serving
from v0_10_scale_out.cluster import joint
from v0_10_scale_out.cluster.joint import Inbox, Outbox
from v0_10_scale_out.cluster.outgoing import ReplicaLostError
from v0_10_scale_out.cluster.replica import ACCEPTED, Replica
from v0_10_scale_out.cluster.routing import Route

REQUEST = contextvars.ContextVar("REQUEST", default=None)  # what Ray knows a request by
SCOPE = {"type": "http", "path": "/", "headers": []}


class Engine:
    """Nothing to start."""

    def start(self):
        pass


class App:
    """Says each byte of a request's body; `!` waits for `go` and `?` is an error."""

    def __init__(self):
        self.state = type("State", (), {"engine": Engine()})
        self.go = asyncio.Event()
        self.num_cancelled = 0

    async def __call__(self, scope, receive, send):
        for byte in (await receive())["body"]:
            if byte == ord("?"):
                raise ValueError("the app's own")
            if byte == ord("!"):
                try:
                    await self.go.wait()
                except asyncio.CancelledError:
                    self.num_cancelled += 1
                    raise
            await send({"type": "http.response.body", "body": bytes([byte])})


class Joined:
    """An inbox and one replica, with all batches that come."""

    def __init__(self):
        self.app, self.batches, self.failure, self.contexts = App(), [], None, []
        self.replica = Replica("r0", self.app)
        self.inbox = Inbox(self.replica.asgi, self.read)

    async def read(self, replica, inbox):
        self.contexts.append(REQUEST.get())
        async for batch in self.replica.outbox(Route(), replica, inbox):
            if self.failure is not None:
                raise self.failure
            self.batches.append(batch)
            yield batch

    async def ask(self, text, told=None):
        said = b""
        async with contextlib.aclosing(self.inbox.ask(Route(), SCOPE, text.encode())) as answer:
            assert await anext(answer) == [{"type": ACCEPTED, "replica": "r0"}]
            if told is not None:
                told.set()
            async for messages in answer:
                said += b"".join(message["body"] for message in messages)
        return said.decode()

    async def assert_idle(self):
        async with asyncio.timeout(5):
            while self.inbox._readers:
                await asyncio.sleep(0.001)
        assert not self.inbox._answers
        assert not self.inbox._open


def test_what_many_say_at_once_is_one_batch_and_comes_to_each_in_its_order():
    async def run():
        joined = Joined()
        texts = [f"{number:03}!{number:03}" for number in range(16)]
        asked = [asyncio.ensure_future(joined.ask(text)) for text in texts]
        while joined.replica._outboxes == {} or sum(map(len, joined.batches)) < 48:
            await asyncio.sleep(0)
        before = len(joined.batches)
        joined.app.go.set()
        assert await asyncio.gather(*asked) == texts
        assert len(joined.batches) - before == 1
        assert sum(map(len, joined.batches)) == sum(map(len, texts)) + 16  # and an end for each
        await joined.assert_idle()

    asyncio.run(run())


@pytest.mark.parametrize("leaver", [0, 1], ids=["the first", "another one"])
def test_who_leaves_ends_his_answer_at_the_replica_and_no_other(leaver):
    """Also the first one, whose request has opened the stream for all: the stream is no part of it."""

    async def run():
        joined = Joined()
        told = [asyncio.Event() for _ in range(3)]
        REQUEST.set("of a client")
        asked = [asyncio.ensure_future(joined.ask("ab!c", one)) for one in told]
        for one in told:
            await one.wait()
        await asyncio.sleep(0.01)
        asked[leaver].cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked[leaver]
        assert joined.app.num_cancelled == 1
        joined.app.go.set()
        assert [await one for one in asked if not one.cancelled()] == ["ab!c", "ab!c"]
        assert set(joined.contexts) == {None}
        await joined.assert_idle()

    asyncio.run(run())


def test_an_error_of_the_app_is_told_to_the_one_who_asked():
    async def run():
        joined = Joined()
        other = asyncio.ensure_future(joined.ask("x!y"))
        with pytest.raises(ValueError, match="the app's own"):
            await joined.ask("ab?c")
        joined.app.go.set()
        assert await other == "x!y"
        await joined.assert_idle()

    asyncio.run(run())


@pytest.mark.parametrize(
    "failure", [ConnectionError("broken"), asyncio.CancelledError("broken")], ids=["error", "cancel"]
)
def test_where_the_stream_breaks_all_answers_of_that_replica_are_lost_and_the_next_one_is_served(failure):
    async def run():
        joined = Joined()
        told = [asyncio.Event() for _ in range(3)]
        asked = [asyncio.ensure_future(joined.ask("ab!c", one)) for one in told]
        for one in told:
            await one.wait()
        await asyncio.sleep(0.01)
        joined.failure = failure
        joined.app.go.set()
        for one in asked:
            with pytest.raises(ReplicaLostError, match="broken"):
                await one
        joined.failure = None
        assert await joined.ask("abc") == "abc"
        await joined.assert_idle()

    asyncio.run(run())


def test_one_after_the_other_is_not_kept_waiting(monkeypatch):
    """A stream that has just ended is opened again for the next answer."""
    monkeypatch.setattr(joint, "PAUSE_SECONDS", 0.0)

    async def run():
        joined = Joined()
        for number in range(50):
            assert await joined.ask(f"{number}") == f"{number}"
        await joined.assert_idle()

    asyncio.run(run())


def test_a_call_that_ray_cancels_is_a_lost_one():
    async def run():
        joined = Joined()

        async def cancelled(*_):
            yield [{"type": ACCEPTED, "replica": "r0"}]
            raise asyncio.CancelledError

        joined.inbox._ask = cancelled
        with pytest.raises(ReplicaLostError, match="cancelled"):
            await joined.ask("abc")

    asyncio.run(run())


def test_a_second_reader_takes_over_and_the_first_one_ends():
    async def run():
        outbox = Outbox()
        with outbox.opened(1) as put:
            first, second = outbox.batches(), outbox.batches()
            put({"n": 0})
            assert await anext(first) == [(1, {"n": 0})]
            waiting = asyncio.ensure_future(anext(second))
            await asyncio.sleep(0)
            with pytest.raises(StopAsyncIteration):
                await anext(first)
            put({"n": 1})
            assert await waiting == [(1, {"n": 1})]
        with pytest.raises(StopAsyncIteration):
            await anext(second)
        assert outbox.is_forgotten

    asyncio.run(run())


def test_what_an_ingress_that_is_no_more_has_left_goes_when_the_next_one_comes():
    async def run():
        replica = Replica("r0", App())
        with replica._outbox("first").opened(1) as put:
            put({})
            replica._outbox("second")
            assert set(replica._outboxes) == {"first", "second"}  # an answer is open
        replica._outbox("third")
        assert set(replica._outboxes) == {"third"}

    asyncio.run(run())


def test_the_outbox_of_another_replica_is_refused():
    """A router that cannot reach the one which is meant takes another one: it must not give away what it has."""

    async def run():
        with pytest.raises(ValueError, match="This is r0, not r1"):
            await anext(Joined().replica.outbox(Route(), "r1", "inbox"))

    asyncio.run(run())


def test_tokens_are_the_same_joined_and_each_in_its_own_stream():
    serve = functools.partial(serving, num_blocks=200, block_size=4)
    answers = []
    for is_joint in (True, False):
        with serve([Successor(), Successor()], joint=is_joint) as server:
            streamed = [server.complete(prompt=[65 + i, 66 + i], stream=True, max_tokens=8) for i in range(6)]
            answers.append(["".join(body["choices"][0]["text"] for body in bodies(answer)) for answer in streamed])
            wait_until(lambda server=server: not server.ingress._num_running, "all answers have ended")
    assert answers[0] == answers[1]
    assert answers[0][:2] == ["CDEFGHIJ", "DEFGHIJK"]
