"""The page in a browser: what it shows is what the engine says, and what a model says stays text."""

import itertools
import json

from tests.kit.browser import account, grid, is_live, page_of
from tests.kit.models import Recall, ScriptModel, Successor
from tests.kit.server import held, wait_until

SINCE = "v0_8"
KEY = "sk-secret/+key"
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><b>bold</b> 🎈  two spaces"


def states(page, request_id):
    """Record from now on, in the page, every state that a row has."""
    page.evaluate(
        """id => {
          window.seen = [];
          const look = () => {
            const state = document.querySelector(`[data-request="${id}"]`)?.dataset.state;
            if (state && state !== window.seen.at(-1)) window.seen.push(state);
            requestAnimationFrame(look);
          };
          look();
        }""",
        request_id,
    )


def test_the_page_loads_and_shows_a_request_from_its_first_state_to_its_last(serve, chromium):
    control = {"allow_control": True}
    with (
        serve(Successor(), num_blocks=100, block_size=4, max_num_batched_tokens=8, server=control) as server,
        page_of(server, chromium) as page,
        held(server) as (_, submit),
    ):
        is_live(page)
        page.wait_for_function("() => document.querySelector('#model').textContent.includes('tiny')")
        server.http.post("/events/control", json={"paused": True})
        answer = submit(server.complete, prompt=[*range(40, 60)], max_tokens=4)
        page.wait_for_selector("#requests [data-request]")
        request_id = page.get_attribute("#requests [data-request]", "data-request")
        states(page, request_id)
        seen = [page.get_attribute(f'[data-request="{request_id}"]', "data-state").lower()]
        for step in itertools.count(1):
            server.http.post("/events/control", json={"steps": 1})
            page.wait_for_function("n => window.visualizer.state.step >= n", arg=step - 1)
            page.wait_for_timeout(50)  # the frame that draws it
            state = page.get_attribute(f'[data-request="{request_id}"]', "data-state").lower()
            seen += [state] if state != seen[-1] else []
            if state in ("done", "finished"):
                break
        assert seen == ["waiting", "prefill", "decode", "done"]
        assert answer.result().json()["choices"][0]["text"] in page.inner_text(f'[data-request="{request_id}"]')


def test_the_grid_is_the_block_managers_account_after_every_step_of_a_run_with_preemption_and_sharing(serve, chromium):
    control = {"allow_control": True}
    with (
        serve(Recall(), num_blocks=13, block_size=4, server=control) as server,
        page_of(server, chromium) as page,
        held(server) as (_, submit),
    ):
        is_live(page)
        server.http.post("/events/control", json={"paused": True})
        answers = [
            submit(server.complete, prompt=[*range(8)], max_tokens=14, n=2),
            submit(server.complete, prompt=[*range(8), 9], max_tokens=14),
            submit(server.complete, prompt=[*range(30, 39)], max_tokens=14),
        ]
        wait_until(lambda: len(server.engine.output_processor.parents) == 3, "all three are there")
        kinds, states_seen = set(), set()
        for step in itertools.count():
            server.http.post("/events/control", json={"steps": 1})
            wait_until(lambda: server.engine.num_steps == step + 1, "the step is made")  # noqa: B023
            page.wait_for_function("n => window.visualizer.state.step >= n", arg=step)
            page.wait_for_timeout(50)
            assert grid(page) == account(server.engine)
            kinds |= set(page.eval_on_selector_all("#pool [data-block]", "all => all.map(b => b.dataset.state)"))
            states_seen |= set(
                page.eval_on_selector_all("#requests [data-request]", "a => a.map(r => r.dataset.state)")
            )
            if not server.engine.has_unfinished_requests():
                break
        assert {"free", "owned", "shared", "cached"} <= kinds
        assert "preempted" in {state.lower() for state in states_seen}
        assert [answer.result().status_code for answer in answers] == [200, 200, 200]


def test_a_page_that_is_opened_late_shows_the_true_state_and_one_that_lost_its_connection_finds_it_again(
    serve, chromium
):
    with serve(Successor(), num_blocks=100, block_size=4) as server, held(server, 5, 8) as (gate, submit):
        answer = submit(server.complete, prompt=[*b"ABCDEFGHI"], max_tokens=30)
        gate.reached(5)
        with page_of(server, chromium) as page:
            wait_until(lambda: server.app.state.engine._commands, "a snapshot is asked for")
            gate.go(5)
            is_live(page)
            gate.reached(8)
            page.wait_for_selector('#requests [data-request][data-state="decode" i]')
            page.wait_for_function("() => window.visualizer.state.step === 6")
            assert "JKLMNOP" in page.inner_text("#requests [data-request]")
            assert grid(page) == account(server.engine)
            gate.go(8)
            answer.result()
            wait_until(lambda: not server.engine.has_unfinished_requests(), "it has ended")
            page.wait_for_function(
                "() => [...document.querySelectorAll('[data-request]')].every(r => /done/i.test(r.dataset.state))"
            )
            assert grid(page) == {}
            # The connection breaks, and things happen meanwhile.
            page.evaluate("() => window.visualizer.source.socket.close()")
            page.wait_for_selector('#connection:not([data-state="open"])', state="attached")
            page.wait_for_selector('#connection[data-state="open"]')
            answer = submit(server.complete, prompt=[*b"ABCDEFGHI"], max_tokens=3)
            answer.result()
            page.wait_for_function("() => document.querySelectorAll('[data-request]').length >= 1")
            assert grid(page) == account(server.engine) == {}


def test_what_prompts_and_models_say_is_shown_as_it_is_and_never_run(serve, chromium):
    script = HOSTILE.encode()
    with (
        serve(ScriptModel([*script], len(script)), num_blocks=200, block_size=16) as server,
        page_of(server, chromium) as page,
    ):
        is_live(page)
        title = page.title()
        server.complete(prompt=HOSTILE, max_tokens=len(script))
        page.wait_for_function("() => document.querySelector('[data-request]')?.dataset.state.toLowerCase() === 'done'")
        row = page.locator("#requests [data-request]").first
        assert row.evaluate("row => row.textContent").count(HOSTILE) == 2  # the prompt, and the answer
        assert page.eval_on_selector_all("#requests img, #requests b, #log img, #log b", "found => found.length") == 0
        assert page.title() == title


def test_without_the_flag_the_controls_are_off_and_say_why(serve, chromium):
    with serve(Successor()) as server, page_of(server, chromium) as page:
        is_live(page)
        pause = page.get_by_role("button", name="Pause")
        assert pause.is_disabled()
        assert "--allow-control" in page.inner_text("#control")


def test_prompts_are_submitted_from_the_page_and_pause_and_step_work_by_buttons(serve, chromium):
    control = {"allow_control": True}
    with (
        serve(Successor(), num_blocks=100, block_size=4, server=control) as server,
        page_of(server, chromium) as page,
    ):
        is_live(page)
        page.get_by_role("button", name="Pause").click()
        wait_until(lambda: server.app.state.engine.pace.paused, "it is paused")
        page.locator("#control textarea").fill("AB\nCD\nEF")
        page.get_by_role("button", name="Submit").click()
        wait_until(lambda: len(server.engine.output_processor.parents) == 3, "three prompts are three requests")
        page.wait_for_function("() => document.querySelectorAll('[data-request]').length === 3")
        assert server.engine.num_steps == 0
        page.get_by_role("button", name="Step", exact=False).first.click()
        wait_until(lambda: server.engine.num_steps == 1, "one step is made")
        page.wait_for_function("() => window.visualizer.state.step === 0")
        page.get_by_role("button", name="Resume").click()
        page.wait_for_function(
            "() => [...document.querySelectorAll('[data-request]')].every(r => /done/i.test(r.dataset.state))"
        )


def test_vis_1_the_page_asks_for_the_key_and_sends_it(serve, chromium):
    with serve(Successor(), server={"api_key": [KEY]}) as server, page_of(server, chromium) as page:
        page.wait_for_selector("#key-form", state="visible")
        page.fill("#api-key", KEY)
        page.press("#api-key", "Enter")
        is_live(page)
        assert not page.is_visible("#key-form")
        assert all(KEY not in url for url in page.requests)
        page.errors.clear()  # a browser writes each refused request to its console


def test_a_recording_replays_forwards_and_backwards_to_the_states_that_were(serve, chromium, tmp_path):
    with serve(Recall(), num_blocks=13, block_size=4) as server:
        with page_of(server, chromium) as page:
            is_live(page)
            server.complete(prompt=[*range(8)], max_tokens=14, n=2)
            page.wait_for_function("() => window.visualizer.state.step > 5")
        file = tmp_path / "run.jsonl"
        file.write_text(server.http.get("/events/recording").text)
        messages = [json.loads(line) for line in file.read_text().splitlines()]
        last = max(message["number"] for message in messages if message["type"] == "step")
        with page_of(server, chromium) as page:
            is_live(page)
            page.set_input_files("#recording-file", file)
            page.wait_for_selector("#replay", state="visible")
            next_step = page.get_by_role("button", name="Next step")
            before = page.get_by_role("button", name="Previous step")
            grids = [None]
            for number in range(4):
                next_step.click()
                page.wait_for_function("n => window.visualizer.state.step === n", arg=number)
                page.wait_for_timeout(50)
                grids.append(grid(page))
            assert len({json.dumps(sorted(each.items())) for each in grids[1:]}) > 1
            for number in (2, 1, 0):
                before.click()
                page.wait_for_function("n => window.visualizer.state.step === n", arg=number)
                page.wait_for_timeout(50)
                assert grid(page) == grids[number + 1]
            assert last > 4
