"""What clients see of the prefix cache: token counts, metrics, salts, and the route that empties it."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kit.models import ScriptModel, Stepped, Successor
from tests.kit.server import USER, Gate, bodies, metrics, post_lines, texts, wait_for_queue, wait_until

SINCE = "v0_6"
SYSTEM = {"role": "system", "content": "Answer in one short sentence, please."}


def ask(server, prompt, **body):
    """A completion's answer, and how many tokens of its prompt were cached."""
    response = server.complete(prompt=prompt, **({"max_tokens": 2} | body))
    return texts(response)[0], response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def post(server, path, body):
    """As JSON writes it: half a character, too, which httpx would not."""
    return server.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


def test_usage_says_how_much_of_the_prompt_was_cached_whole_streamed_and_in_every_chunk(serve):
    with serve(Successor(), num_blocks=100, block_size=4) as server:
        prompt = [*b"ABCDEFGHIJ"]
        for num_cached in (0, 8, 8):
            whole = server.complete(prompt=prompt, max_tokens=2).json()["usage"]
            assert whole == {
                "prompt_tokens": 10,
                "completion_tokens": 2,
                "total_tokens": 12,
                "prompt_tokens_details": {"cached_tokens": num_cached},
            }
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = bodies(server.complete(prompt=prompt, max_tokens=2, stream=True, stream_options=options))
        assert [chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks] == [8] * len(chunks)
        assert chunks[-1]["usage"] == whole
        # Of several prompts the sum; of several choices the prompt counts once.
        several = server.complete(prompt=[prompt, prompt, [*b"other tokens"]], max_tokens=2, n=2).json()["usage"]
        assert (several["prompt_tokens"], several["prompt_tokens_details"]) == (32, {"cached_tokens": 16})


def test_a_chats_second_turn_finds_the_first_one_and_its_answer(serve):
    with serve(ScriptModel([*b"ABCDEFGHIJKL"], 70), num_blocks=100, block_size=4) as server:
        messages = [SYSTEM, {"role": "user", "content": "Hi"}]
        first = server.chat(messages=messages, max_tokens=12).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        answer = first["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And now?"}]
        second = server.chat(messages=messages, max_tokens=1).json()["usage"]
        # BYTE-TOK gives the answer the ids that it had. All but the last of its tokens were computed, in blocks of 4.
        in_common = first["usage"]["prompt_tokens"] + 12 - 1
        assert second["prompt_tokens_details"]["cached_tokens"] == in_common // 4 * 4


def test_metrics_count_queries_and_hits_in_tokens_under_vllms_names(serve):
    with serve(Successor(), num_blocks=100, block_size=4) as server:
        prompt = [*b"ABCDEFGHIJ"]
        names = (
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "prompt_tokens_total",
            "prompt_tokens_cached_total",
        )
        assert [metrics(server)[name] for name in names] == [0, 0, 0, 0]
        ask(server, prompt)
        assert [metrics(server)[name] for name in names] == [10, 0, 10, 0]
        ask(server, prompt, n=3)
        assert [metrics(server)[name] for name in names] == [20, 8, 20, 8]
        assert 'enable_prefix_caching="True"' in server.http.get("/metrics").text


def test_without_the_cache_nothing_is_looked_for_and_the_counts_are_0(serve):
    with serve(Successor(), num_blocks=100, block_size=4, enable_prefix_caching=False) as server:
        prompt = [*b"ABCDEFGHIJ"]
        assert [ask(server, prompt), ask(server, prompt)] == [("KL", 0)] * 2
        assert metrics(server)["prefix_cache_queries_total"] == metrics(server)["prefix_cache_hits_total"] == 0
        assert 'enable_prefix_caching="False"' in server.http.get("/metrics").text
        assert server.http.post("/reset_prefix_cache").json() == {"success": True}


def test_a_request_that_waited_for_blocks_is_counted_once(serve):
    # In the tight pool the second one is preempted, and finds its own blocks again: no hit of its prompt.
    with serve(Successor(), num_blocks=6, block_size=4) as server:
        response = server.complete(prompt=[[*b"AAAAAA"], [*b"BBBBBB"]], max_tokens=10)
        values = metrics(server)
        assert values["num_preemptions_total"] > 0
        assert (values["prefix_cache_queries_total"], values["prefix_cache_hits_total"]) == (12, 0)
        assert response.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_the_log_line_says_how_many_tokens_were_cached(serve, caplog):
    with serve(Successor(), num_blocks=100, block_size=4) as server:
        caplog.set_level("INFO")
        for number, num_cached in enumerate((0, 8), 1):
            ask(server, [*b"ABCDEFGHIJ"])
            assert f" prompt_tokens=10 cached_tokens={num_cached} output_tokens=2 " in post_lines(caplog, number)[-1]


def test_only_the_same_salt_finds_what_was_computed_under_it(serve, caplog):
    with serve(Successor(), num_blocks=100, block_size=4) as server:
        caplog.set_level("DEBUG")
        prompt = [*b"ABCDEFGHIJ"]
        cached = [ask(server, prompt, **given)[1] for given in ({}, {"cache_salt": "s4lt"}, {"cache_salt": "other"})]
        assert cached == [0, 0, 0]
        cached = [ask(server, prompt, **given)[1] for given in ({"cache_salt": "s4lt"}, {}, {"cache_salt": None})]
        assert cached == [8, 8, 8]
        chats = [server.chat(cache_salt=salt).json()["usage"] for salt in ("s4lt", "s4lt", "other")]
        assert [usage["prompt_tokens_details"]["cached_tokens"] > 0 for usage in chats] == [False, True, False]
        assert "s4lt" not in caplog.text


@pytest.mark.parametrize("salt", ["", 1, ["a"], {"a": 1}, True, "x" * 129, "\ud800"])
def test_a_salt_that_is_no_text_is_refused_by_its_name(serve, salt):
    with serve(Successor(), num_blocks=100) as server:
        for path, given in (("chat/completions", {"messages": USER}), ("completions", {"prompt": "Hi"})):
            response = post(server, f"/v1/{path}", given | {"cache_salt": salt})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "cache_salt"


@pytest.mark.parametrize("salt", ["🦜", "a" * 128, " ", "é" * 128])
def test_any_text_is_a_salt(serve, salt):
    with serve(Successor(), num_blocks=100, block_size=4) as server:
        assert [ask(server, [*b"ABCDEFGHIJ"], cache_salt=salt)[1] for _ in range(2)] == [0, 8]


def test_resetting_the_cache_forgets_everything_and_disturbs_nobody(serve):
    prompt = [*b"ABCDEFGHIJ"]
    with serve(Successor(), num_blocks=100, block_size=4) as server:
        assert [ask(server, prompt), ask(server, prompt)] == [("KL", 0), ("KL", 8)]
        with Gate(server.engine, 3) as gate, ThreadPoolExecutor() as clients:
            running = clients.submit(server.complete, prompt=prompt, max_tokens=12)
            gate.reached(3)  # it has taken over two blocks, and has two tokens of twelve
            reset = clients.submit(server.http.post, "/reset_prefix_cache")
            wait_until(lambda: server.app.state.engine._commands, "the reset waits for the end of the step")
            gate.go(3)
            assert texts(running.result()) == ["KLMNOPQRSTUV"]
            assert reset.result().json() == {"success": True}
        assert ask(server, [*prompt, *b"KLMNOPQRSTUV"])[1] == 0  # nor is what it computed after the reset found
        assert ask(server, prompt)[1] == 8


def test_resetting_needs_the_key_and_only_post(serve):
    with serve(Successor(), num_blocks=100, server={"api_key": ["k"]}) as server:
        assert server.http.post("/reset_prefix_cache").status_code == 401
        assert server.http.post("/reset_prefix_cache", headers={"Authorization": "Bearer k"}).status_code == 200
        assert server.http.get("/reset_prefix_cache", headers={"Authorization": "Bearer k"}).status_code == 405


def test_a_reset_that_waits_for_an_engine_that_dies_is_told(serve):
    with serve(Successor(), num_blocks=100) as server, Gate(server.engine, 1) as gate, ThreadPoolExecutor() as clients:
        completion = clients.submit(server.complete, max_tokens=5)
        gate.reached(1)
        commands = server.app.state.engine._commands
        reset = clients.submit(server.http.post, "/reset_prefix_cache")
        wait_until(lambda: commands, "the reset waits for the end of the step")

        def die():
            raise MemoryError("made up")

        commands.appendleft(die)
        gate.go(1)
        assert (completion.result().status_code, reset.result().status_code) == (503, 503)


def test_more_choices_than_may_run_at_once_are_refused_before_anything_runs(serve):
    with serve(Successor(), num_blocks=100, max_num_seqs=2) as server:
        response = server.complete(n=3, max_tokens=1)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], "max_num_seqs" in error["message"]) == ("n", True)
        assert texts(server.complete(prompt=[*b"AB"], n=2, max_tokens=2)) == ["CD", "CD"]


def test_queued_choices_all_count_as_waiting(serve):
    model = Stepped([65], 2)
    with (
        serve(model, num_blocks=100, max_num_seqs=3, server={"max_queued_requests": 3}) as server,
        ThreadPoolExecutor() as clients,
    ):
        first = clients.submit(server.complete, max_tokens=3)
        wait_until(lambda: metrics(server)["num_requests_running"] == 1, "the first one runs")
        second = clients.submit(server.complete, n=3, max_tokens=1)
        wait_for_queue(server, 3)
        assert server.app.state.engine.num_waiting == 3
        assert server.complete(max_tokens=1).status_code == 503
        model.steps.release(1000)
        assert (first.result().status_code, second.result().status_code) == (200, 200)
