"""The playground in a browser: Python runs there, gives what CPython gives, and a reader's mistakes end well.

The page's own files are served as the site has them, but within a page that mkdocs has not built. Skipped where
Playwright, Chromium, or the assets are missing: `python -m tools.playground_assets` fetches those.
"""

import contextlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import playground
import pytest
import replay

from common.measuring.browser import served
from tests.kit.browser import page_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "playground"
FREE = "block_manager.py:BlockManager.free"
BROKEN = "self._free.extend(table[1:])"


def make_site(folder):
    """The page, what it loads, and the visualizer's page."""
    (folder / "visualizer").mkdir()
    for path in replay.web_files(ROOT):
        shutil.copy(path, folder / "visualizer")
    target = folder / "playground"
    shutil.copytree(FOLDER, target, ignore=shutil.ignore_patterns("__pycache__"))
    for address, path in (playground.copied_files(ROOT) | playground.vendored_files(ROOT)).items():
        (target / address).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / address)
    for address, content in playground.generated_files(ROOT).items():
        (target / address).parent.mkdir(parents=True, exist_ok=True)
        (target / address).write_text(content, encoding="utf-8")
    page = (ROOT / "docs" / "playground.md").read_text(encoding="utf-8")
    html = page[page.index("<link") : page.index("</script>")] + "</script>"
    (target / "index.html").write_text(
        '<!doctype html><html lang="en"><meta charset="utf-8"><link rel="icon" href="../visualizer/icon.svg">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<style>[data-md-color-scheme=default] {color-scheme: light} [data-md-color-scheme=slate] {color-scheme: dark}"
        "</style>"
        f'<body data-md-color-scheme="default"><main class="md-typeset">{html}</main></body></html>',
        encoding="utf-8",
    )
    return folder


@pytest.fixture(scope="module")
def serve():
    with contextlib.ExitStack() as servers:
        yield lambda folder: SimpleNamespace(url=servers.enter_context(served(folder)))


@pytest.fixture(scope="module")
def site(tmp_path_factory, serve):
    if None in playground.manifest(ROOT)["packages"].values():
        pytest.skip("the playground's tests need its assets: python -m tools.playground_assets")
    return serve(make_site(tmp_path_factory.mktemp("site")))


def opened(site, chromium, query="", **options):
    return page_of(site, chromium, f"/playground/{query}", **options)


def shows_a_run(page):
    page.wait_for_function("() => window.playground?.shown")


def start(page):
    page.set_default_timeout(120_000)
    page.wait_for_function("() => window.playground")
    page.click("#start")
    page.wait_for_function("() => window.playground.isStarted && !window.playground.isRunning")


@pytest.fixture(scope="module")
def started(site, chromium):
    """A page with Python, for all tests that leave it as they like: each begins with a preset or a challenge."""
    with opened(site, chromium) as page:
        start(page)
        yield page


def choose(page, name):
    page.evaluate("id => playground.choosePreset(playground.presets.find(each => each.id === id))", name)
    page.wait_for_function("() => !window.playground.isRunning")


def take(page, name):
    page.evaluate("id => playground.take(playground.challenges.find(each => each.id === id))", name)


def change(page, old, new):
    """Replace a piece of the function that stands in the editor."""
    page.evaluate(
        """([old, text]) => {
          const code = playground.editor.codeMirror;
          code.setValue(code.getValue().replace(old, () => text));
        }""",
        [old, new],
    )


def write(page, edit, old, new):
    """Replace a piece of a function in the editor, and run."""
    page.select_option("#function", edit)
    change(page, old, new)
    page.click("#run")
    page.wait_for_function("() => !window.playground.isRunning")


def notice(page):
    return page.inner_text("#playground .notice") if page.is_visible("#playground .notice") else ""


def test_nothing_is_loaded_until_the_reader_asks_and_a_run_from_the_build_is_shown(site, chromium):
    with opened(site, chromium) as page:
        shows_a_run(page)
        page.wait_for_selector("#start", state="visible")
        assert not [url for url in page.requests if "/vendor/" in url or url.endswith(".py")]
        assert page.is_disabled("#dial-token_budget")
        assert page.inner_text('[data-metric="num_preemptions"] td') == "1"
        frame = page.frame_locator(".drawing-frame")
        frame.locator("#requests [data-request]").nth(2).wait_for(state="attached")
        assert frame.locator("#requests [data-request]").count() == 3
        page.click('[data-milestone="v0_6_prefix_cache"]')
        page.wait_for_function("() => window.playground.shown.metrics.num_cached_tokens > 0")
        assert not [url for url in page.requests if "/vendor/" in url]


def test_every_preset_gives_in_the_browser_what_it_gives_in_cpython_event_by_event(started):
    for preset in playground.presets(ROOT):
        choose(started, preset["id"])
        here = json.loads(json.dumps(playground.recorded(preset)))
        there = started.evaluate("() => playground.shown")
        assert there["messages"] == here["messages"], preset["id"]
        assert there["metrics"] == here["metrics"], preset["id"]
        drawn = started.evaluate(
            "() => document.querySelector('.drawing-frame').contentWindow.visualizer.source.track.messages.length"
        )
        assert drawn == len(here["messages"])


def test_a_dial_gives_another_run_beside_the_one_before(started):
    choose(started, "small-budget")
    started.fill("#dial-token_budget", "2048")
    started.wait_for_function("() => playground.shown.messages[0].settings.max_num_batched_tokens === 2048")
    cells = started.locator('[data-metric="longest_gap"] td').all_inner_texts()
    assert cells[2].startswith("+")
    assert started.locator('[data-metric="longest_gap"] .worse').count() == 1
    assert "token_budget=2048" in started.url
    assert started.get_attribute('[data-preset="small-budget"]', "aria-pressed") == "false"


def test_a_setting_that_cannot_be_run_is_refused_in_words_and_the_last_run_stays(started):
    choose(started, "three-requests")
    started.fill("#dial-num_blocks", "2")
    started.wait_for_function(
        "() => /can never be served/.test(document.querySelector('.playground .notice').textContent)"
    )
    assert "Request A can never be served" in notice(started)
    assert started.inner_text('[data-metric="num_steps"] td') == "23"
    started.fill("#dial-num_blocks", "8")
    started.wait_for_function("() => document.querySelector('.playground .notice').hidden")


def test_an_edit_that_breaks_an_invariant_is_told_at_its_step_and_a_reset_mends_it(started):
    choose(started, "three-requests")
    write(started, FREE, "self._free.extend(reversed(table))", BROKEN)
    text = notice(started)
    assert "check_integrity() failed: a block is lost, or in two places" in text
    failure = started.evaluate("() => playground.shown.failure")
    assert text.startswith(f"Step {failure['step']}: ")
    # The drawing stands at that step.
    started.wait_for_function(
        "step => document.querySelector('.drawing-frame').contentWindow.visualizer.state.step === step",
        arg=failure["step"],
    )
    assert failure["step"] == 14  # where C is the first to give its blocks back
    started.get_by_role("button", name="Diff").click()
    assert f"+    {BROKEN}" in started.inner_text(".diff")
    assert "-    self._free.extend(reversed(table))" in started.inner_text(".diff")
    started.get_by_role("button", name="Diff").click()
    started.get_by_role("button", name="Reset", exact=True).click()
    started.wait_for_function("() => playground.shown.failure === null")
    assert notice(started) == ""
    assert "edits=" not in started.url


def test_a_run_plays_and_one_that_has_failed_stands_at_its_step(site, chromium):
    with opened(site, chromium, reduced_motion="no-preference") as page:
        shows_a_run(page)
        step = "document.querySelector('.drawing-frame').contentWindow.visualizer?.state.step"
        page.evaluate("() => document.querySelector('.drawing-frame').scrollIntoView()")
        page.wait_for_function(f"() => {step} > 3")
        start(page)
        write(page, FREE, "self._free.extend(reversed(table))", BROKEN)
        page.evaluate("() => document.querySelector('.drawing-frame').scrollIntoView()")
        page.wait_for_function(f"() => {step} === 14")
        page.wait_for_timeout(700)
        assert page.evaluate(f"() => {step}") == 14
        assert page.locator('[data-metric="seconds"] td').count() == 1, "a run that has failed is not compared"


def test_an_error_in_the_readers_code_marks_its_line(started):
    choose(started, "three-requests")
    write(started, "scheduler.py:Scheduler.add", "self.waiting.append(request)", "self.waitin.append(request)")
    assert "AttributeError" in notice(started)
    assert "line" in notice(started)
    assert started.inner_text(".failed .CodeMirror-line").strip() == "self.waitin.append(request)"
    write(started, "scheduler.py:Scheduler.add", "self.waitin.append(request)", "self.waiting.append(request")
    assert "was never closed" in notice(started)
    assert started.locator(".failed").count() == 1


def test_an_endless_loop_is_ended_and_the_page_does_not_freeze_meanwhile(started):
    choose(started, "three-requests")
    started.evaluate(
        "() => { playground.python.limit = 1500; window.ticks = 0; window.ticking = setInterval(() => ticks++, 20); }"
    )
    number = started.evaluate("() => playground.python.numStarts")
    started.select_option("#function", "scheduler.py:Scheduler.schedule")
    change(started, "    budget = ", "    while True:\n        pass\n    budget = ")
    started.click("#run")
    started.wait_for_function("() => playground.isRunning")
    started.evaluate("() => { window.ticks = 0; }")
    started.click('summary:has-text("Setting")')  # the page still does what it is told
    started.click('summary:has-text("Setting")')
    started.wait_for_function("() => /endless loop/.test(document.querySelector('.playground .notice').textContent)")
    assert started.evaluate("() => window.ticks") > 20
    started.wait_for_function("() => !playground.isRunning")
    assert started.evaluate("() => playground.python.numStarts") == number + 1
    started.evaluate("() => { playground.python.limit = 60000; clearInterval(window.ticking); }")
    started.get_by_role("button", name="Reset all").click()
    started.wait_for_function("() => playground.shown.failure === null && !playground.isRunning")
    assert notice(started) == ""


def test_a_link_brings_the_whole_setting_and_its_code_is_run_only_when_asked(site, chromium, started):
    choose(started, "small-pool")
    write(started, FREE, "self._free.extend(reversed(table))", "self._free.extend(table)")
    started.fill("#dial-num_blocks", "20")
    started.wait_for_function("() => playground.shown.messages[0].settings.num_blocks === 20")
    address = started.url
    expected = started.evaluate("() => playground.shown.messages")
    with opened(site, chromium, address[address.index("?") :]) as page:
        page.wait_for_function("() => window.playground")
        page.wait_for_selector(".playground .notice:has-text('code of its own')")
        assert page.input_value("#dial-num_blocks") == "20"
        start(page)
        assert page.evaluate("() => playground.shown") is None
        assert "Look at it in the editor" in notice(page)
        page.wait_for_selector(".diff .added")
        assert "+    self._free.extend(table)" in page.inner_text(".diff")
        page.fill("#dial-seed", "1")  # another setting doesn't run it either
        page.fill("#dial-seed", "0")
        page.wait_for_timeout(600)
        assert page.evaluate("() => playground.shown") is None
        page.click("#run")
        shows_a_run(page)
        assert page.evaluate("() => playground.shown.messages") == expected


def test_a_lessons_link_shows_the_milestones_first_preset(site, chromium):
    with opened(site, chromium, "?milestone=v0_6_prefix_cache") as page:
        shows_a_run(page)
        assert page.get_attribute('[data-preset="one-beginning"]', "aria-pressed") == "true"
        assert page.evaluate("() => playground.shown.metrics.num_cached_tokens") == 9 * 160


def test_a_link_that_was_cut_off_is_told(site, chromium):
    with opened(site, chromium, "?milestone=v0_3_scheduler&edits=abc") as page:
        page.wait_for_selector(".playground .notice:has-text('cut off')")
        page.errors.clear()


def test_each_challenge_is_open_with_the_original_and_solved_with_its_solution(started):
    for milestone in ("v0_3_scheduler", "v0_6_prefix_cache", "v0_7_speculative"):
        started.click(f'[data-milestone="{milestone}"]')
        started.wait_for_function("m => playground.functions.has(m) && !playground.isRunning", arg=milestone)
        ids = started.eval_on_selector_all("[data-challenge]", "all => all.map(each => each.dataset.challenge)")
        assert len(ids) == 3
        for name in ids:
            started.click(f'[data-challenge="{name}"]')
            started.wait_for_function(
                "() => /This is the original/.test(document.querySelector('.verdict')?.textContent ?? '')"
            )
            assert f"challenge={name}" in started.url
            started.click("#solution")
            started.wait_for_selector('.verdict[data-solved="true"]')
            assert "Solved." in started.inner_text(".verdict")
            # Part of the solution undone: the goal is checked, not that something was changed.
            started.get_by_role("button", name="Reset all").click()
            started.wait_for_selector('.verdict[data-solved="false"]')


def test_the_readers_code_cannot_reach_the_network(started):
    choose(started, "three-requests")
    write(
        started,
        "scheduler.py:Scheduler.add",
        "self.waiting.append(request)",
        "import js\n    js.fetch('/secret')\n    self.waiting.append(request)",
    )
    assert "ModuleNotFoundError" in notice(started) or "ImportError" in notice(started)
    assert not [url for url in started.requests if "secret" in url]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light")])
def test_nothing_is_wider_than_the_window_and_the_frame_has_the_pages_theme(site, chromium, width, scheme):
    with opened(site, chromium, viewport={"width": width, "height": 900}) as page:
        shows_a_run(page)
        wanted = "slate" if scheme == "dark" else "default"
        page.evaluate("wanted => { document.body.dataset.mdColorScheme = wanted; }", wanted)
        inside = "document.querySelector('.drawing-frame').contentDocument.documentElement"
        page.wait_for_function(f"scheme => {inside}.dataset.theme === scheme", arg=scheme)
        # The frame grows with its content, so that it has no scroll bar of its own.
        page.wait_for_function(
            f"() => {inside}.scrollHeight <= document.querySelector('.drawing-frame').clientHeight + 2"
            f" && {inside}.scrollHeight > 800"
        )
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width


def test_without_the_assets_the_page_says_what_is_missing_and_shows_the_runs_of_the_build(
    tmp_path_factory, serve, chromium, monkeypatch
):
    monkeypatch.setattr(playground, "vendored_files", lambda root: {})
    bare = serve(make_site(tmp_path_factory.mktemp("bare")))
    with page_of(bare, chromium, "/playground/") as page:
        shows_a_run(page)
        assert not page.is_visible("#start")
        assert "built without Pyodide" in page.inner_text(".start-text")
        assert "make docs" in page.inner_text(".start-text")
        page.click('[data-preset="small-pool"]')
        page.wait_for_function("() => playground.shown.metrics.num_preemptions > 3")
        assert page.is_disabled("#dial-num_blocks")
