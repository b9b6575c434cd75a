"""The playground's simulator: it runs the milestones' own files, tells what they do, and its tasks can be solved."""

import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import playground
import pytest
from simulator import challenges, entry
from simulator.cost import CostModel
from simulator.policy import EditError, Policy, functions, swap
from simulator.scenario import SettingError, Settings, scripts
from simulator.simulation import run

from tools import cost_model, playground_assets

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "playground"
SOLUTIONS = json.loads((FOLDER / "solutions.json").read_text(encoding="utf-8"))
SCHEDULE = "scheduler.py:Scheduler.schedule"
HARD = {  # preemption, sharing, forks, chunks, drafts and evictions in one run
    "num_requests": 12,
    "arrival": "poisson",
    "rate": 8,
    "num_blocks": 26,
    "shared_prefix": 40,
    "prefix_groups": 2,
    "token_budget": 64,
    "num_speculative_tokens": 4,
    "num_choices": 2,
}


@pytest.fixture(scope="module", autouse=True)
def _folders():
    entry.use_folder(FOLDER, {name: ROOT / name for name in playground.MILESTONES})


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The files that the worker gets, in a folder of their own."""
    folder = tmp_path_factory.mktemp("site")
    copied = playground.copied_files(ROOT)
    for address in playground.python_files(ROOT):
        target = folder / address
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(copied.get(address, FOLDER / address).read_bytes())
    return folder


def ask(settings, milestone="v0_3_scheduler", **more):
    asked = {"do": "run", "milestone": milestone, "settings": settings, "edits": {}, "challenge": None} | more
    return json.loads(entry.handle(json.dumps(asked)))


def edit_of(milestone, edit):
    return dict(playground.edited(ROOT, milestone, edit))


# The files.


@pytest.mark.parametrize("milestone", playground.MILESTONES)
def test_the_policy_in_the_site_is_the_milestones_byte_for_byte(site, milestone):
    names = {path.name for path in (site / "policies" / milestone).iterdir()}
    assert {"scheduler.py", "block_manager.py", "request.py"} <= names
    for name in names:
        assert (site / "policies" / milestone / name).read_bytes() == (ROOT / milestone / name).read_bytes()
    for name in playground.COMMON:
        assert (site / "common" / name).read_bytes() == (ROOT / "common" / name).read_bytes()


def test_all_of_it_runs_on_the_standard_library_alone(site):
    script = (
        "import sys, json\n"
        f"sys.path[:0] = [{str(site)!r}]\n"
        "from simulator import entry\n"
        f"settings = {HARD!r}\n"
        f"for milestone in {list(playground.MILESTONES)!r}:\n"
        "    asked = {'do': 'run', 'milestone': milestone, 'settings': settings, 'edits': {}}\n"
        "    answer = json.loads(entry.handle(json.dumps(asked)))\n"
        "    assert answer['error'] is answer['failure'] is None, answer\n"
        "    assert answer['metrics']['num_finished'] == 24\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names))))\n"
    )
    command = [sys.executable, "-I", "-S", "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    names = {
        name for name in json.loads(found.stdout) if not re.fullmatch(r"policy_\d+|__main__|_distutils_hack", name)
    }
    assert names == {"common", "simulator"}


# The messages.


def state_after(messages, last):
    """Owners of each block, cached blocks, and the state of each request once the first `last` messages are folded."""
    owners, cached, requests = {}, set(), {}
    for message in messages[:last]:
        block, request = message.get("block"), message.get("request_id")
        match message["type"]:
            case "request_queued":
                requests[request] = "waiting"
            case "request_admitted" | "request_forked":
                requests[request] = "running"
            case "request_preempted":
                requests[request] = "preempted"
            case "request_finished":
                requests[request] = "done"
            case "block_allocated" | "block_shared":
                owners.setdefault(block, set()).add(request)
                if message["type"] == "block_allocated":
                    assert owners[block] == {request}, "a block is given to two"
                    cached.discard(block)
            case "block_freed":
                owners[block].remove(request)
                assert message["ref_count"] == len(owners[block])
            case "block_cached":
                cached.add(block)
            case "block_evicted":
                cached.remove(block)
    return {block: who for block, who in owners.items() if who}, cached, requests


def without_order(messages):
    """The messages of each step as a bag: within a step the order of those about blocks differs."""
    steps, bag = [], []
    for message in messages[1:]:
        bag.append(json.dumps({key: value for key, value in message.items() if key != "seq"}, sort_keys=True))
        if message["type"] == "step":
            steps.append(Counter(bag))
            bag = []
    return steps


@pytest.mark.parametrize("seed", range(5))
def test_what_is_found_by_comparing_is_what_the_bus_of_v0_8_says(seed):
    compared, told = (
        ask(HARD | {"seed": seed}, milestone)["messages"] for milestone in ("v0_7_speculative", "v0_8_visualizer")
    )
    kinds = Counter(message["type"] for message in compared)
    assert min(kinds[kind] for kind in ("request_preempted", "block_shared", "block_copied", "block_evicted")) > 0
    assert len(compared) == len(told)
    assert without_order(compared) == without_order(told)


@pytest.mark.parametrize("milestone", playground.MILESTONES)
def test_the_messages_are_numbered_and_fold_to_the_block_managers_account_after_each_step(milestone):
    policy = Policy(milestone, entry.sources_of(milestone))
    seen = []
    update = policy["Scheduler"].update

    def watched(self, output, sampled):
        taken = update(self, output, sampled)
        tables = {r.request_id: self.block_manager.block_table(r.request_id) for r in self.running}
        published = set(getattr(self.block_manager, "_published", {}).values())
        seen.append((tables, published))
        return taken

    policy["Scheduler"].update = watched
    result = run(policy, Settings.of(HARD | {"milestone": milestone}), entry.cost_model())
    assert result.failure is None
    assert [message["seq"] for message in result.messages] == list(range(-1, len(result.messages) - 1))
    assert result.messages[0]["type"] == "snapshot"
    ends = [index + 1 for index, message in enumerate(result.messages) if message["type"] == "step"]
    assert len(ends) == len(seen) == result.metrics["num_steps"]
    for end, (tables, published) in zip(ends, seen, strict=True):
        owners, cached, requests = state_after(result.messages, end)
        expected = {}
        for request_id, table in tables.items():
            for block in table:
                expected.setdefault(block, set()).add(request_id)
        assert owners == expected
        assert cached == published
        assert {request for request, state in requests.items() if state == "running"} == set(tables)
    times = [message["time"] for message in result.messages]
    assert times == sorted(times)


def test_the_lessons_three_requests_lose_the_blocks_that_the_lesson_says():
    preset = next(preset for preset in playground.presets(ROOT) if preset["id"] == "three-requests")
    messages = playground.recorded(preset)["messages"]
    steps = [message for message in messages if message["type"] == "step"]
    assert len(steps) == 23
    assert {step["number"]: step["preempted"] for step in steps if step["preempted"]} == {14: ["C/0"]}
    assert [step["num_free_blocks"] for step in steps[:6]] == [7, 6, 4, 3, 2, 1]  # the trace in docs/milestones/v0_3.md
    lost = next(message for message in messages if message["type"] == "request_preempted")
    assert (lost["request_id"], lost["num_blocks"]) == ("C/0", 2)
    refused = [step["refused_reason"] for step in steps if step["refused"]]
    assert {"token_budget", "preemption", "blocks"} >= set(refused)


def test_the_request_that_made_another_lose_its_blocks_is_named():
    found = {}
    for milestone in ("v0_3_scheduler", "v0_8_visualizer"):
        settings = {"requests": "30+60, 30+60, 30+60", "num_blocks": 9, "prefix_caching": False}
        messages = ask(settings, milestone)["messages"]
        found[milestone] = [
            (m["request_id"], m["for_request_id"]) for m in messages if m["type"] == "request_preempted"
        ]
    assert found["v0_3_scheduler"] == found["v0_8_visualizer"]
    assert found["v0_3_scheduler"][:2] == [("C/0", "A/0"), ("B/0", "B/0")]


# Metrics.


def test_the_metrics_of_a_run_that_can_be_counted_by_hand():
    # 10 ms a step and nothing else: A's prompt takes two steps of 8 tokens, then it writes 3 tokens.
    policy = Policy("v0_3_scheduler", entry.sources_of("v0_3_scheduler"))
    cost = CostModel({"step": 10, "request": 0, "token": 0, "pair": 0})
    settings = Settings.of({"requests": "16+3, 4+2@0.015", "token_budget": 8, "num_blocks": 8})
    metrics = run(policy, settings, cost).metrics
    a, b = metrics["requests"]["A/0"], metrics["requests"]["B/0"]
    assert a["ttft"] == pytest.approx(0.020)
    assert a["end"] == pytest.approx(0.040)
    assert a["tpot"] == pytest.approx(0.010)
    assert b["ttft"] == pytest.approx(0.015)  # it comes in the middle of the second step, and is in the third
    assert b["end"] == pytest.approx(0.040)
    assert metrics["num_steps"] == 4
    assert metrics["num_scheduled_tokens"] == 16 + 2 + 4 + 1
    assert metrics["tokens_per_s"] == pytest.approx(5 / 0.04)
    assert metrics["mean_pool_use"] == pytest.approx((1 + 1 + 3 + 3 - 0) / 4 / 8, abs=0.1)


def test_tokens_that_a_preemption_has_lost_are_counted_as_computed_twice():
    metrics = ask({"requests": "37+20, 26+16, 20+12", "num_blocks": 8, "token_budget": 16})["metrics"]
    # C had computed its prompt and all but the newest of its tokens.
    assert metrics["num_preemptions"] == 1
    lost = [
        m
        for m in ask({"requests": "37+20, 26+16, 20+12", "num_blocks": 8, "token_budget": 16})["messages"]
        if m["type"] == "request_preempted"
    ]
    assert metrics["num_recomputed_tokens"] == lost[0]["num_tokens"] == 28


def test_a_step_costs_the_sum_of_its_parts():
    cost = CostModel({"step": 10, "request": 1, "token": 0.1, "pair": 0.01})
    # Two requests: 3 tokens behind 5 attend to 6 + 7 + 8, and 1 behind 9 to 10.
    assert cost.seconds([(3, 5), (1, 9)]) == pytest.approx((10 + 2 + 0.4 + 0.31) / 1e3)


# The cost model.


def test_the_committed_cost_model_is_what_the_measurements_give():
    assert cost_model.main(["--check"]) == 0


def test_the_cost_model_fits_the_measured_steps_and_each_experiments_ratio_or_the_page_says_why_not():
    model = json.loads((FOLDER / "cost_model.json").read_text())
    assert all(value > 0 for value in model["ms"].values())
    assert all(abs(each["error"]) < 0.03 for each in model["fit"].values())
    outside = {
        (name, way)
        for name, experiment in model["experiments"].items()
        for way, ratio in experiment["ratios"].items()
        if abs(ratio["error"]) > cost_model.TOLERANCE
    }
    assert set(model["experiments"]) == {"batching", "static_batching", "chunked_prefill", "token_budget"}
    assert outside == {("token_budget", "64")}
    page = (ROOT / "docs" / "playground.md").read_text(encoding="utf-8")
    assert "budget of 64" in page, "the page has to say why that one is further off"


def test_a_simulated_experiment_is_worked_out_again_by_hand():
    # One after the other: a prompt of 30 and 31 decodes, 16 times.
    model = json.loads((FOLDER / "cost_model.json").read_text())
    ms = model["ms"]
    first = ms["step"] + ms["request"] + 30 * ms["token"] + 30 * 31 / 2 * ms["pair"]
    later = sum(ms["step"] + ms["request"] + ms["token"] + context * ms["pair"] for context in range(31, 62))
    rate = model["experiments"]["batching"]["ways"]["one at a time"]["simulated"]
    assert rate == pytest.approx(32 / (first + later) * 1e3, rel=1e-4)


# Edits.


@pytest.mark.parametrize("milestone", playground.MILESTONES)
def test_a_function_that_is_put_back_as_it_was_leaves_its_file_as_it_was(milestone):
    for file, source in entry.sources_of(milestone).items():
        found = list(functions(source))
        assert found, file
        for each in found:
            assert swap(source, each.name, each.text, "x") == source


def test_an_edit_that_breaks_an_invariant_is_told_at_its_step_with_its_message_and_line():
    edit = {
        "block_manager.py:BlockManager.free": [
            ["    self._free.extend(reversed(table))", "    self._free.extend(table[1:])"]
        ]
    }
    answer = ask({"requests": "20+3, 20+9"}, edits=edit_of("v0_3_scheduler", edit))
    failure = answer["failure"]
    assert failure["kind"] == "integrity"
    assert failure["message"] == "a block is lost, or in two places"
    ended = next(m for m in answer["messages"] if m["type"] == "request_finished")
    step = next(m for m in answer["messages"] if m["type"] == "step" and m["seq"] > ended["seq"])
    assert failure["step"] == step["number"] == 2
    place = failure["place"]
    assert (place["file"], place["function"]) == ("block_manager.py", "BlockManager.check_integrity")
    source = (ROOT / "v0_3_scheduler" / "block_manager.py").read_text().split("\n")
    assert place["text"] == source[place["line"] - 1].strip()


def test_an_error_in_an_edited_function_is_told_with_the_line_of_the_edit():
    text = edit_of(
        "v0_3_scheduler", {SCHEDULE: [["    budget = self.max_num_batched_tokens\n", "    budget = 1 / 0\n"]]}
    )
    failure = ask({}, edits=text)["failure"]
    assert (failure["kind"], failure["message"], failure["step"]) == ("error", "ZeroDivisionError: division by zero", 0)
    place = failure["place"]
    assert place["is_edited"]
    assert (place["function"], place["text"]) == ("Scheduler.schedule", "budget = 1 / 0")
    assert text[SCHEDULE].split("\n")[place["line_in_function"] - 1].strip() == "budget = 1 / 0"


RETURN = "    return SchedulerOutput(requests"
BEYOND = "    num_scheduled_tokens[0] += 600\n"
NOTHING = "    requests, num_scheduled_tokens, block_tables = [], [], []\n"
NO_TABLES = "    block_tables = [[] for _ in requests]\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (BEYOND, "; its budget is 512."),
        (NOTHING, "The step computes nothing, though requests are there"),
        (NO_TABLES, "A/0: 0 blocks of 16 don't hold 0 + "),
        ("    num_scheduled_tokens[0] = 0\n", "A/0 is in the step, but computes 0 tokens."),
        ("    requests[1] = requests[0]\n", "A request is in the step twice."),
    ],
)
def test_a_decision_that_the_engine_could_not_carry_out_is_told(line, message):
    edits = edit_of("v0_3_scheduler", {SCHEDULE: [[RETURN, line + RETURN]]})
    failure = ask({}, edits=edits)["failure"]
    assert (failure["kind"], failure["step"]) == ("rule", 0)
    assert message in failure["message"]


def test_a_request_that_is_lost_is_missed():
    edit = edit_of(
        "v0_3_scheduler",
        {
            "scheduler.py:Scheduler.add": [
                [
                    "    self.waiting.append(request)",
                    "    if request.request_id != 'B/0':\n        self.waiting.append(request)",
                ]
            ]
        },
    )
    failure = ask({"requests": "20+3, 20+9"}, edits=edit)["failure"]
    assert failure["message"] == "1 of 2 requests were never finished, but the scheduler knows none."


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("def schedule(self):\n    return 1 +", "invalid syntax", 2),
        ("def other(self):\n    pass", "The edited text has no function schedule.", None),
    ],
)
def test_an_edit_that_is_no_such_function_is_refused_with_its_line(text, message, line):
    error = ask({}, edits={SCHEDULE: text})["error"]
    assert error["kind"] == "edit"
    assert message in error["message"]
    assert (error["edit"], error["line"]) == (SCHEDULE, line)


def test_an_edit_of_nothing_is_refused():
    with pytest.raises(EditError, match="no function"):
        swap("x = 1\n", "f", "def f(): pass", "x.py:f")
    assert ask({}, edits={"other.py:f": ""})["error"]["message"] == "v0_3_scheduler has no file other.py."


def test_what_the_readers_code_prints_and_how_it_differs_is_told():
    edit = edit_of(
        "v0_3_scheduler",
        {
            "scheduler.py:Scheduler.add": [
                ["    self.waiting.append(request)", "    print(request.request_id)\n    self.waiting.append(request)"]
            ]
        },
    )
    answer = ask({"requests": "20+3, 20+9"}, edits=edit)
    assert answer["printed"] == "A/0\nB/0\n"
    assert "+    print(request.request_id)" in answer["diffs"]["scheduler.py:Scheduler.add"]
    assert answer["original"]["seconds"] == answer["metrics"]["seconds"]


# Settings.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 0}, "num_blocks is a whole number from 1 to 1024, not 0."),
        ({"acceptance": "x"}, "acceptance is a number from 0 to 1, not 'x'."),
        ({"arrival": "now"}, "arrival is one of all, poisson, bursts, long, not 'now'."),
        ({"min_prompt": 50, "max_prompt": 40}, "min_prompt (50) is above max_prompt (40)."),
        ({"requests": "37-20"}, "requests are like '37+20, 26+16@0.5' (prompt + answer @ second), not '37-20'."),
        ({"num_blocks": 2}, "Request A can never be served: "),
    ],
)
def test_a_setting_that_cannot_be_run_is_refused_in_words(settings, message):
    error = ask(settings)["error"]
    assert error["kind"] == "setting"
    assert message in error["message"]


def test_patterns_of_arrival():
    def arrivals(**settings):
        return [script.arrival for script in scripts(Settings.of(settings | {"num_requests": 8, "rate": 2}))]

    assert arrivals() == [0] * 8
    assert arrivals(arrival="bursts") == [0] * 4 + [0.5] * 4
    assert arrivals(arrival="long", long_after=1.5) == [0] * 7 + [1.5]
    poisson = arrivals(arrival="poisson")
    assert poisson[0] == 0
    assert poisson == sorted(poisson)
    assert len(set(poisson)) == 8
    with pytest.raises(SettingError):
        Settings.of({"rate": 0})


def test_prompts_of_a_group_begin_alike_and_go_on_differently():
    found = scripts(Settings.of({"num_requests": 4, "shared_prefix": 20, "prefix_groups": 2}))
    assert found[0].prompt[:20] == found[2].prompt[:20] != found[1].prompt[:20]
    assert not set(found[0].prompt[20:]) & set(found[2].prompt[20:])


# Presets and challenges.


@pytest.mark.parametrize("preset", playground.presets(ROOT), ids=lambda preset: preset["id"])
def test_every_preset_runs_to_its_end(preset):
    answer = playground.recorded(preset)
    assert answer["failure"] is None
    assert answer["metrics"]["num_finished"] == answer["metrics"]["num_requests"]


def test_the_presets_show_what_they_claim():
    found = {preset["id"]: playground.recorded(preset)["metrics"] for preset in playground.presets(ROOT)}
    assert found["small-budget"]["longest_gap"] < found["large-budget"]["longest_gap"] / 10
    assert found["small-budget"]["max_ttft"] > found["large-budget"]["max_ttft"]
    # The answer on the page: 35 chunks of 56 tokens and one of 40, and the last full one takes the longest.
    preset = next(preset for preset in playground.presets(ROOT) if preset["id"] == "small-budget")
    messages = playground.recorded(preset)["messages"]
    chunks = [m for m in messages if m["type"] == "prefill_chunk" and m["request_id"] == "I/0"]
    assert [chunk["num_new_tokens"] for chunk in chunks] == [56] * 35 + [40]
    steps = [m for m in messages if m["type"] == "step"]
    longest = max(steps, key=lambda step: step["run_seconds"])
    assert longest["time"] == chunks[-2]["time"]
    assert found["continuous"]["tokens_per_s"] > 1.2 * found["static"]["tokens_per_s"]
    assert found["small-pool"]["num_preemptions"] > 3
    assert found["one-beginning"]["mean_ttft"] < found["no-cache"]["mean_ttft"] / 2
    assert found["one-beginning"]["num_cached_tokens"] == 9 * 160
    good, bad = found["good-guesses"], found["bad-guesses"]
    assert good["num_output_tokens"] / good["num_steps"] > 4  # of two requests
    assert bad["num_accepted_tokens"] < bad["num_draft_tokens"] / 5


@pytest.mark.parametrize("challenge", challenges.CHALLENGES, ids=lambda challenge: challenge.id)
def test_a_challenge_is_not_solved_by_the_original_and_is_by_its_solution(challenge):
    source = entry.sources_of(challenge.milestone)
    for edit in challenge.functions:
        file, _, name = edit.partition(":")
        assert name in {each.name for each in functions(source[file])}
    solution = edit_of(challenge.milestone, SOLUTIONS[challenge.id]["edit"])
    unchanged = {
        edit: next(
            f.text for f in functions(source[edit.partition(":")[0]]) if f"{edit.partition(':')[0]}:{f.name}" == edit
        )
        for edit in solution
    }
    for edits, is_solved in ((unchanged, False), (solution, True)):
        answer = ask(challenge.settings, challenge.milestone, edits=edits, challenge=challenge.id)
        assert answer["failure"] is answer["error"] is None
        assert answer["verdict"]["is_solved"] is is_solved, answer["verdict"]


def test_each_milestone_has_three_challenges_and_each_of_them_a_solution():
    counts = Counter(challenge.milestone for challenge in challenges.CHALLENGES)
    assert counts == {"v0_3_scheduler": 3, "v0_6_prefix_cache": 3, "v0_7_speculative": 3}
    assert SOLUTIONS.keys() == {challenge.id for challenge in challenges.CHALLENGES}


def test_an_edit_that_drops_answers_solves_nothing():
    shortest = challenges.challenge("shortest-first")
    before = ask(shortest.settings)["metrics"]
    after = before | {"num_output_tokens": before["num_output_tokens"] - 1, "mean_ttft": 0.0}
    assert shortest.verdict(before, after)["is_solved"] is False


# The assets.


def test_an_archive_that_is_not_the_expected_one_is_refused(tmp_path, monkeypatch):
    archive = tmp_path / "codemirror.tgz"
    archive.write_bytes(b"something else")
    with pytest.raises(playground_assets.AssetError, match="is not the archive"):
        playground_assets.unpack(archive, "codemirror", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    # With the right sum, but without a file that the page loads:
    import base64
    import tarfile

    with tarfile.open(archive, "w:gz") as tar:
        tar.add(__file__, "package/LICENSE")
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    monkeypatch.setitem(playground_assets.INTEGRITY, "codemirror", f"sha512-{digest}")
    with pytest.raises(playground_assets.AssetError, match=r"has no file lib/codemirror\.js"):
        playground_assets.unpack(archive, "codemirror", tmp_path / "out")


def test_without_npm_it_says_so_and_is_no_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(playground_assets, "ROOT", tmp_path)
    monkeypatch.setattr(playground_assets.shutil, "which", lambda name: None)
    assert playground_assets.main() == 0
    assert "recorded runs only: npm" in capsys.readouterr().err


def test_the_manifest_names_a_package_only_if_all_of_it_is_there(tmp_path):
    for milestone in ("docs/playground/simulator", *playground.MILESTONES):
        (tmp_path / milestone).mkdir(parents=True)
    assert playground.manifest(tmp_path)["packages"] == {"pyodide": None, "codemirror": None}
    for name in playground_assets.FILES["codemirror"]:
        assert playground.manifest(tmp_path)["packages"]["codemirror"] is None
        path = playground_assets.folder_of(tmp_path, "codemirror") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    assert (
        playground.manifest(tmp_path)["packages"]["codemirror"]["version"] == playground_assets.VERSIONS["codemirror"]
    )
