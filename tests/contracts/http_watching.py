"""What a viewer is told over `WS /events`: the truth from the first message on, and never at another one's expense."""

import asyncio
import base64
import contextlib
import importlib
import itertools
import json
import logging

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from tests.contracts.prefix_caching import greedy, recall_engine, tokens
from tests.kit.models import ScriptModel, Successor
from tests.kit.server import access_lines, held, running, wait_until
from tests.kit.watching import Follower

SINCE = "v0_8"
KEY = "sk-secret/+key"
WITH_KEY = {"Authorization": f"Bearer {KEY}"}


@contextlib.contextmanager
def viewer(server, path="/events", **options):
    """A connection; `receive()` gives the next message."""
    url = server.url.replace("http", "ws", 1) + path
    with connect(url, proxy=None, open_timeout=20, max_size=None, **options) as connection:
        connection.receive = lambda: json.loads(connection.recv(timeout=20))
        yield connection


def code_of_the_end(connection):
    """Why the server has closed a connection, after whatever it had to say before."""
    with contextlib.suppress(ConnectionClosed):
        while True:
            connection.receive()
    return connection.close_code


def snapshot_of(server):
    module = importlib.import_module(f"{type(server.engine).__module__.rpartition('.')[0]}.snapshot")
    return module.take_snapshot(server.engine)


def subprotocols(key):
    return ["mini-vllm", "mini-vllm.key." + base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")]


def test_a_viewer_gets_a_snapshot_and_then_consecutive_events_that_fold_to_the_engines_state(serve):
    with serve(Successor(), num_blocks=100, block_size=4) as server, viewer(server) as connection:
        first = connection.receive()
        assert {name: first[name] for name in ("seq", "type", "reason", "model", "step", "requests", "pace")} == {
            "seq": -1,
            "type": "snapshot",
            "reason": "connected",
            "model": "tiny",
            "step": -1,
            "requests": [],
            "pace": {"paused": False, "delay": 0.0},
        }
        assert first["settings"]["allow_control"] is False
        assert first["settings"]["num_blocks"] == 100
        server.complete(prompt=[*b"ABCDEFGHI"], max_tokens=6, n=2)
        messages = [connection.receive()]
        while messages[-1]["type"] != "step" or messages[-1]["num_running"]:
            messages.append(connection.receive())
        assert [message["seq"] for message in messages] == list(range(len(messages)))
        assert [message["time"] for message in messages] == sorted(message["time"] for message in messages)
        follower = Follower(first)
        for message in messages:
            follower.take(message)
        follower.assert_equals(snapshot_of(server))
        assert set(follower.ended.values()) == {"length"}
        assert (
            "".join(m["text"] for m in messages if m.get("request_id", "").endswith("/1") and "text" in m) == "JKLMNO"
        )


def test_a_late_viewer_sees_the_true_state_of_what_has_run_for_a_while(serve):
    with serve(Successor(), num_blocks=100, block_size=4) as server, held(server, 5) as (gate, submit):
        answer = submit(server.complete, prompt=[*b"ABCDEFGHI"], max_tokens=8)
        gate.reached(5)  # four tokens are there, and a fifth is about to be computed
        with viewer(server) as connection:
            wait_until(lambda: server.app.state.engine._commands, "a snapshot is asked for")
            gate.go(5)
            snapshot = connection.receive()
            [request] = snapshot["requests"]
            assert (request["text"], request["state"], request["num_output_tokens"]) == ("JKLMN", "decode", 5)
            assert len(request["block_table"]) == 4
            follower = Follower(snapshot)
            while not follower.ended:
                follower.take(connection.receive())
            texts = [message.get("text", "") for message in follower.messages]
            assert "".join(texts) == "OPQ"
        assert answer.result().status_code == 200


def test_a_viewer_who_falls_behind_gets_a_new_snapshot_and_nobody_waits_for_it(milestone, monkeypatch):
    viewers_module, async_engine = (
        importlib.import_module(f"{milestone.__name__}.{name}") for name in ("server.viewers", "async_engine")
    )
    monkeypatch.setattr(viewers_module, "MOST_WAITING", 40)

    async def run():
        llm_engine = recall_engine(milestone, num_blocks=100)
        engine = async_engine.AsyncEngine(llm_engine, max_queued_requests=10, observer=NoObserver())
        engine.start()
        hub = viewers_module.Viewers(engine, {}, {}, most_recorded=0)
        slow, quick = hub.watch(), hub.watch()
        followers = [Follower(json.loads(await anext(watching))) for watching in (slow, quick)]
        engine.set_pace(paused=True)  # a step only when the quick one has all of the last: none outruns it

        async def until_the_end(name):
            engine.submit(name, [(None, tokens(9))], greedy(20))
            while f"{name}-0/0" not in followers[1].ended:
                engine.set_pace(num_steps=1)
                kind = None
                while kind != "step":
                    message = json.loads(await anext(quick))
                    followers[1].take(message)
                    kind = message["type"]

        for name in "ABC":  # the quick one takes everything, and the slow one nothing
            await until_the_end(name)
        # What waited for the slow one is dropped. It begins again with a snapshot, and then misses nothing.
        first = json.loads(await anext(slow))
        assert (first["type"], first["reason"]) == ("snapshot", "behind")
        followers[0].begin(first)
        seq = first["seq"]

        async def take_next():
            nonlocal seq
            message = json.loads(await anext(slow))
            assert message["seq"] == seq + 1
            seq += 1
            followers[0].take(message)

        while seq < followers[1].messages[-1]["seq"]:
            await take_next()
        engine.submit("D", [(None, tokens(9))], greedy(3))
        engine.set_pace(paused=False)
        while "D-0/0" not in followers[0].ended:
            await take_next()
        await slow.aclose()
        await quick.aclose()
        await engine.shutdown(0)

    asyncio.run(run())


class NoObserver:
    """Is told everything, and says nothing."""

    def on_output(self, output, seconds, is_first):
        pass

    def on_abort(self, request_id, num_choices, reason):
        pass


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({}, 401),
        ({"additional_headers": {"Authorization": "Bearer wrong"}}, 401),
        ({"subprotocols": ["mini-vllm"]}, 401),
        ({"subprotocols": subprotocols("wrong")}, 401),
        ({"subprotocols": ["mini-vllm", "mini-vllm.key.!"]}, 401),
        ({"additional_headers": WITH_KEY, "origin": "https://elsewhere.example"}, 403),
        ({"additional_headers": WITH_KEY, "origin": "null"}, 403),
    ],
)
def test_vis_1_who_has_no_key_or_comes_from_elsewhere_is_refused_before_the_connection_is_accepted(
    serve, options, status
):
    with serve(Successor(), server={"api_key": [KEY]}) as server:
        with pytest.raises(InvalidStatus) as refused, viewer(server, **options):
            pass
        assert refused.value.response.status_code == status
        error = json.loads(refused.value.response.body)["error"]
        assert error["type"] == "invalid_request_error"
        assert error["code"] == ("invalid_api_key" if status == 401 else "origin_not_allowed")
        assert server.http.get("/health").status_code == 200
        assert server.complete().status_code == 401


@pytest.mark.parametrize(
    "options",
    [{"additional_headers": WITH_KEY}, {"subprotocols": subprotocols(KEY)}],
    ids=["header", "subprotocol"],
)
def test_vis_1_who_has_the_key_is_let_in_and_no_log_line_has_the_key(serve, caplog, options):
    with caplog.at_level(logging.DEBUG), serve(Successor(), server={"api_key": [KEY]}) as server:
        own = server.url  # a page of this server
        with viewer(server, origin=own, **options) as connection:
            assert connection.receive()["type"] == "snapshot"
            assert connection.subprotocol == ("mini-vllm" if "subprotocols" in options else None)
        wait_until(lambda: any("/events 101" in line for line in access_lines(caplog)), "the log has its line")
    lines = [r.getMessage() for r in caplog.records if not r.name.startswith("websockets.client")]
    assert not [line for line in lines if KEY in line or subprotocols(KEY)[1] in line]


@pytest.mark.parametrize(
    ("allowed", "is_let_in"), [('["*"]', False), ('["https://blog.example"]', True), ('["https://b.example"]', False)]
)
def test_pages_of_other_origins_watch_only_where_they_are_named(serve, allowed, is_let_in):
    with serve(Successor(), server={"allowed_origins": allowed, "allow_control": True}) as server:
        origin = "https://blog.example"
        with (
            contextlib.nullcontext() if is_let_in else pytest.raises(InvalidStatus),
            viewer(server, origin=origin) as c,
        ):
            assert c.receive()["type"] == "snapshot"
        recording = server.http.get("/events/recording", headers={"Origin": origin})
        assert (recording.status_code != 403) is is_let_in
        control = server.http.post("/events/control", json={"paused": False}, headers={"Origin": origin})
        assert (control.status_code == 200) is is_let_in
        assert server.http.post("/v1/completions", json={"prompt": "a"}, headers={"Origin": origin}).status_code == 200


def test_behind_a_prefix_events_are_found_with_it_and_guarded_with_it(serve):
    with serve(Successor(), server={"root_path": "/llm", "api_key": [KEY]}) as server:
        for path in ("/events", "/llm/events"):
            with viewer(server, path, additional_headers=WITH_KEY) as connection:
                assert connection.receive()["type"] == "snapshot"
            with pytest.raises(InvalidStatus), viewer(server, path):
                pass


def test_the_recording_begins_with_a_snapshot_and_replays_to_the_same_state(serve):
    with serve(Successor(), num_blocks=100, block_size=4) as server:
        nothing = server.http.get("/events/recording")
        assert nothing.status_code == 404
        assert "nobody has watched" in nothing.json()["error"]["message"]
        with viewer(server) as connection:
            connection.receive()
        server.complete(prompt=[*b"ABCDEFGHI"], max_tokens=6)  # nobody watches now, and it is recorded
        wait_until(lambda: '"request_finished"' in server.http.get("/events/recording").text, "it is recorded")
        response = server.http.get("/events/recording")
        assert response.headers["content-type"] == "application/jsonl"
        assert "attachment" in response.headers["content-disposition"]
        first, *rest = [json.loads(line) for line in response.text.splitlines()]
        assert (first["type"], first["reason"]) == ("snapshot", "recorded")
        assert [message["seq"] for message in rest] == list(range(first["seq"] + 1, first["seq"] + 1 + len(rest)))
        follower = Follower(first)
        for message in rest:
            follower.take(message)
        follower.assert_equals(snapshot_of(server))


def test_the_recording_is_bounded_and_every_part_of_it_begins_with_a_snapshot(serve):
    with serve(Successor(), num_blocks=100, block_size=4, server={"max_recorded_events": 100}) as server:
        with viewer(server) as connection:
            connection.receive()
            for _ in range(10):
                server.complete(prompt=[*b"ABCDEFGHI"], max_tokens=20)
        lines = [json.loads(line) for line in server.http.get("/events/recording").text.splitlines()]
        assert 50 <= len(lines) < 150  # of some 600: two parts of 50 at most, and the rest of a step each
        assert lines[0]["type"] == "snapshot"
        assert lines[0]["step"] > 50
        follower = Follower(lines[0])
        for before, message in itertools.pairwise(lines):
            assert message["seq"] == before["seq"] + (message["type"] != "snapshot")
            if message["type"] == "snapshot":
                follower.assert_equals(message)
                follower.begin(message)
            else:
                follower.take(message)


def test_without_recording_there_is_none(serve):
    with serve(Successor(), server={"max_recorded_events": 0}) as server:
        with viewer(server) as connection:
            connection.receive()
            server.complete()
        response = server.http.get("/events/recording")
        assert (response.status_code, "switched off" in response.text) == (404, True)


@pytest.mark.parametrize("body", [{"paused": True}, {"steps": 1}, {"delay": 1.0}])
def test_control_is_refused_without_its_flag_and_the_engine_runs_on(serve, body):
    with serve(Successor()) as server:
        refused = server.http.post("/events/control", json=body)
        assert refused.status_code == 403
        assert "--allow-control" in refused.json()["error"]["message"]
        assert server.complete(max_tokens=5).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [({"steps": 0}, "steps"), ({"steps": 1001}, "steps"), ({"delay": -1}, "delay"), ({"delay": 11}, "delay"),
     ({"paused": "perhaps"}, "paused")],
)  # fmt: skip
def test_a_wrong_order_is_a_400_that_names_the_field(serve, body, param):
    with serve(Successor(), server={"allow_control": True}) as server:
        refused = server.http.post("/events/control", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_paused_the_engine_makes_the_steps_it_is_told_and_no_others(serve):
    with serve(Successor(), num_blocks=100, server={"allow_control": True}) as server, held(server) as (_, submit):

        def control(**body):
            response = server.http.post("/events/control", json=body)
            assert response.status_code == 200, response.text
            return response.json()

        assert control(paused=True) == {"paused": True, "delay": 0.0}
        with viewer(server) as connection:
            snapshot = connection.receive()
            assert snapshot["pace"] == {"paused": True, "delay": 0.0}
            answer = submit(server.complete, prompt=[*b"ABC"], max_tokens=6)
            assert connection.receive()["type"] == "request_queued"
            control(steps=2)
            messages = [connection.receive() for _ in range(7)]
            while sum(message["type"] == "step" for message in messages) < 2:
                messages.append(connection.receive())
            assert server.engine.num_steps == 2
            assert not answer.done()
            with pytest.raises(TimeoutError):  # nothing more comes
                connection.recv(timeout=0.3)
            assert server.engine.num_steps == 2
            assert control(paused=False) == {"paused": False, "delay": 0.0}
            assert answer.result(20).json()["choices"][0]["text"] == "DEFGHI"
            kinds = [connection.receive()["type"] for _ in range(3)]
            assert "pace_changed" in kinds


def test_a_paused_request_can_be_aborted_and_a_paused_server_ends(serve):
    with serve(Successor(), num_blocks=100, server={"allow_control": True}) as server:
        server.http.post("/events/control", json={"paused": True})
        with server.http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 5, "stream": True}):
            wait_until(server.engine.has_unfinished_requests, "the request is there")
        server.assert_idle()
        server.http.post("/events/control", json={"paused": True, "delay": 5})
        # At its end, `serve` waits for the server's.


def test_slow_motion_waits_between_steps_and_not_before_an_order_is_taken(monkeypatch, milestone):
    pace = importlib.import_module(f"{milestone.__name__}.pace")
    now = [0.0]
    monkeypatch.setattr(pace, "_now", lambda: now[0])
    slow = pace.Pace().changed(None, 2.0, 0)
    assert slow.seconds_left() == 0.0
    slow = slow.stepped()
    assert slow.seconds_left() == 2.0
    now[0] = 1.5
    assert slow.seconds_left() == 0.5
    assert slow.changed(None, 0.0, 0).seconds_left() == 0.0
    paused = slow.changed(True, None, 0)
    assert paused.seconds_left() is None
    assert paused.changed(None, None, 1).seconds_left() == 0.0
    assert paused.changed(None, None, 2).stepped().stepped().seconds_left() is None
    assert paused.changed(None, None, 5).changed(False, None, 0).num_steps == 0


def test_more_viewers_than_may_watch_are_told_so(serve, milestone, monkeypatch):
    viewers = importlib.import_module(f"{milestone.__name__}.server.viewers")
    monkeypatch.setattr(viewers, "MOST_VIEWERS", 2)
    with serve(Successor()) as server, viewer(server) as one, viewer(server) as two:
        one.receive(), two.receive()
        with pytest.raises(InvalidStatus) as refused, viewer(server):
            pass
        assert refused.value.response.status_code == 503
        one.close()
        wait_until(lambda: _can_watch(server), "a place is free")


def _can_watch(server):
    with contextlib.suppress(InvalidStatus), viewer(server) as connection:
        return connection.receive()["type"] == "snapshot"
    return False


def test_what_a_viewer_says_is_ignored_and_too_much_of_it_ends_the_connection(serve):
    with serve(Successor()) as server:
        with viewer(server) as connection:
            connection.receive()
            for _ in range(50):
                connection.send("pause, please")
            server.complete(max_tokens=2)
            assert connection.receive()["type"] == "request_queued"
            connection.send("x" * 2000)
            assert code_of_the_end(connection) == 1009
        assert server.complete(max_tokens=2).status_code == 200


def test_viewers_of_a_dead_engine_are_told_that_it_has_ended(serve, monkeypatch, milestone):
    viewers = importlib.import_module(f"{milestone.__name__}.server.viewers")
    monkeypatch.setattr(viewers, "CHECK_SECONDS", 0.05)
    with serve(Successor()) as server, viewer(server) as connection:
        connection.receive()
        monkeypatch.setattr(server.engine.scheduler, "schedule", lambda: 1 / 0)
        assert server.complete().status_code == 503
        assert code_of_the_end(connection) == 1011


def test_a_server_with_viewers_ends_at_once_and_tells_them(milestone):
    with contextlib.ExitStack() as stack:
        with running(milestone, Successor()) as server:
            connection = stack.enter_context(viewer(server))
            connection.receive()
        assert code_of_the_end(connection) == 1012


def test_every_character_of_a_prompt_and_of_an_answer_arrives_as_it_is(serve):
    hostile = "<img src=x onerror=alert(1)> \u2028 🎈"
    with serve(ScriptModel([*hostile.encode()], len(b"Hi"))) as server, viewer(server) as connection:
        snapshot = connection.receive()
        server.complete(prompt=hostile[:2], max_tokens=1)
        assert snapshot["requests"] == []
        assert connection.receive()["prompt"] == hostile[:2]


def test_the_page_and_its_files_come_from_here_and_may_load_nothing_from_elsewhere(serve, milestone):
    with serve(Successor(), server={"api_key": [KEY]}) as server:
        assert server.http.get("/visualizer").headers["location"] == "visualizer/"
        assert server.http.get("/visualizer?theme=dark").headers["location"] == "visualizer/?theme=dark"
        page = server.http.get("/visualizer/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        names = {path.name for path in importlib.import_module(f"{milestone.__name__}.server.visualizer").WEB.iterdir()}
        for name in names:
            file = server.http.get(f"/visualizer/{name}")
            assert file.status_code == 200
            assert file.headers["x-content-type-options"] == "nosniff"
            if name.endswith(".js"):
                assert file.headers["content-type"].startswith("text/javascript")
            assert "http://" not in file.text.replace("http://www.w3.org/", "")
            assert "https://" not in file.text
        for path in ("../server/app.py", "..%2fserver%2fapp.py", "%2e%2e/engine.py", "nothing.js", "/etc/passwd"):
            assert server.http.get(f"/visualizer/{path}").status_code == 404


def test_of_a_chat_its_last_message_is_shown_and_of_token_ids_nothing(serve):
    with serve(Successor()) as server, viewer(server) as connection:
        connection.receive()
        parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
        messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": parts}]
        server.chat(messages=messages, max_tokens=1)
        server.complete(prompt=[65, 66], max_tokens=1)
        prompts = []
        while len(prompts) < 2:
            message = connection.receive()
            if message["type"] == "request_queued":
                prompts.append(message["prompt"])
        assert prompts == ["Hi\nthere", None]
