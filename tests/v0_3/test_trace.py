"""`--trace` and the command line of many prompts, as a user meets them."""

import json

import pytest

from tests.conftest import ROOT
from tests.kit.tokenizers import byte_tokenizer, stream
from v0_3_scheduler.generate import main
from v0_3_scheduler.measurements.plot_trace import main as plot_main
from v0_3_scheduler.measurements.plot_trace import plot, rows


@pytest.fixture
def call(capsys, monkeypatch, tiny):
    def run_here(*args, columns=120):
        monkeypatch.setenv("COLUMNS", str(columns))
        code = main([*map(str, args), "--model", str(tiny.folder), "--raw", "--ignore-eos"])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_here


def text(token_ids):
    return "".join(stream(byte_tokenizer(), token_ids)[0]) + "\n"


def test_answers_come_in_the_order_of_the_prompts_in_the_file(call, tiny, tmp_path):
    prompts = ["a long prompt, which is answered late", "b", "", "  c", "d"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n")
    code, out, err = call("--prompts", tmp_path / "prompts.txt", "--max-tokens", 4)
    given = [prompt for prompt in prompts if prompt]
    assert (code, out) == (0, "".join(text(tiny.tokens(list(prompt.encode()), 4)) for prompt in given))
    assert [line for line in err.split("\n") if line.startswith("> ")] == [f"> {prompt}" for prompt in given]


def test_a_trace_has_a_line_for_each_step(call, tmp_path):
    (tmp_path / "prompts.txt").write_text("abcdefgh\nabcdefgh\n")
    options = ["--num-blocks", 5, "--block-size", 4, "--max-tokens", 4, "--trace", "--trace-file", tmp_path / "t.jsonl"]
    code, _, err = call("--prompts", tmp_path / "prompts.txt", *options)
    assert code == 0
    lines = [line.split() for line in err.split("\n")]
    start = lines.index(["step", "running", "waiting", "prefill", "decode", "free", "preempted"])
    # 8 prompt tokens take 2 of 5 blocks each; both need a third for their first decode, and one is left: 1 gives way.
    expected = [
        ["0", "2", "0", "16", "0", "1"],
        ["1", "1", "1", "0", "1", "2", "1/0"],
        ["2", "1", "1", "0", "1", "2"],
        ["3", "0", "1", "0", "1", "5"],
        ["4", "1", "0", "9", "0", "2"],
        ["5", "1", "0", "0", "1", "2"],
        ["6", "0", "0", "0", "1", "5"],
    ]
    assert lines[start + 1 : start + 8] == expected
    entries = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [entry["free"] for entry in entries] == [1, 2, 2, 5, 2, 2, 5]
    assert entries[1]["preempted"] == ["1/0"]
    assert entries[1]["scheduled"] == {"0/0": 1}
    assert entries[1]["queue"] == ["1/0"]
    assert [entry["tables"] for entry in entries[:3]] == [
        {"0/0": [0, 1], "1/0": [2, 3]},
        {"0/0": [0, 1, 4]},
        {"0/0": [0, 1, 4]},
    ]
    for entry in entries:
        assert entry["free"] + sum(len(table) for table in entry["tables"].values()) == 5


def test_tokens_are_the_same_with_and_without_pressure(call, tmp_path):
    (tmp_path / "prompts.txt").write_text("abcdefgh\nijklmnop\nqrstuvwx\n")
    file = ["--prompts", tmp_path / "prompts.txt", "--max-tokens", 6, "--block-size", 4]
    _, free, calm = call(*file, "--num-blocks", 100)
    _, tight, pressed = call(*file, "--num-blocks", 6)
    assert free == tight
    assert calm.split()[-1] == "0"
    assert int(pressed.split()[-1]) > 0


def test_the_table_fits_into_80_columns(call):
    _, _, err = call("Hi", "--max-tokens", 3, columns=80)
    titles, _, row = [line for line in err.split("\n") if line.strip()][-3:]
    assert titles.split() == [
        "requests",
        "prompts",
        "output",
        "mean",
        "TTFT",
        "seconds",
        "output",
        "rate",
        "preemptions",
    ]
    assert row.split()[:5] == ["1", "2", "tokens", "3", "tokens"]


def test_one_prompt_is_streamed_and_choices_are_told_apart(call, tiny):
    answer = text(tiny.tokens([72, 105], 3))
    assert call("Hi", "--max-tokens", 3)[1] == answer
    assert call("Hi", "--max-tokens", 3, "--n", 2)[1] == f"{answer}--- choice 1 ---\n{answer}"


def test_a_timeline_has_a_row_a_request_with_what_it_did_in_each_step():
    entries = [
        {"step": 0, "scheduled": {"0/0": 8, "1/0": 8}, "queue": ["2/0"], "decoding": [], "preempted": []},
        {"step": 1, "scheduled": {"0/0": 1}, "queue": ["1/0", "2/0"], "decoding": ["0/0"], "preempted": ["1/0"]},
    ]
    assert rows(entries) == {
        "0/0": [(0, "prefill"), (1, "decode")],
        "1/0": [(0, "prefill"), (1, "preempted")],
        "2/0": [(0, "waits"), (1, "waits")],
    }


def test_the_run_that_the_page_shows_was_under_pressure(tmp_path):
    trace = ROOT / "v0_3_scheduler" / "measurements" / "pressure.jsonl"
    entries = [json.loads(line) for line in trace.read_text().splitlines()]
    assert sum(len(entry["preempted"]) for entry in entries) == 2
    assert {name for name, events in rows(entries).items() if "preempted" in dict(events).values()} == {"5/0", "6/0"}
    assert sum(kind == "preempted" for events in rows(entries).values() for _, kind in events) == 2
    pytest.importorskip("matplotlib")
    plot(entries, tmp_path / "timeline.svg")
    assert "request 7" in (tmp_path / "timeline.svg").read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read: No such file"), (b"\n \n", "has no prompts"), (b"\xff", "not UTF-8")],
)
def test_a_file_without_prompts_is_told(call, tmp_path, content, message):
    if content is not None:
        (tmp_path / "prompts.txt").write_bytes(content)
    code, _, err = call("--prompts", tmp_path / "prompts.txt")
    assert code == 1
    assert message in err
    assert "Loading" not in err


def test_a_prompt_of_one_token_and_a_last_chunk_of_one_are_no_decodes(call):
    _, _, err = call("a", "--max-tokens", 2, "--trace")
    lines = [line.split() for line in err.split("\n")]
    start = lines.index(["step", "running", "waiting", "prefill", "decode", "free", "preempted"])
    assert [line[3:5] for line in lines[start + 1 : start + 3]] == [["1", "0"], ["0", "1"]]
    _, _, err = call("abcdefghi", "--max-tokens", 2, "--max-num-batched-tokens", 8, "--trace")
    lines = [line.split() for line in err.split("\n")]
    start = lines.index(["step", "running", "waiting", "prefill", "decode", "free", "preempted"])
    assert [line[3:5] for line in lines[start + 1 : start + 4]] == [["8", "0"], ["1", "0"], ["0", "1"]]


def test_wrong_flags_and_files_are_told_before_the_model_is_loaded(call, tmp_path):
    for wrong, message in (
        (["--num-blocks", 0], "num_blocks must be at least 1, got 0"),
        (["--kv-cache-memory", "lots"], "kv_cache_memory must be an amount"),
        (["--trace-file", tmp_path / "no folder" / "t.jsonl"], "no folder/t.jsonl: No such file or directory"),
        (["--prompts", ""], "cannot be read"),
    ):
        code, out, err = call("Hi", *wrong)
        assert (code, out) == (1, "")
        assert message in err
        assert "Loading" not in err


def test_the_table_of_the_run_says_how_long_a_request_may_be_in_this_pool(call):
    _, _, err = call("Hi", "--max-tokens", 1, "--num-blocks", 4, "--block-size", 4, "--max-model-len", 100)
    assert "up to 17 tokens a request" in err


def test_a_plot_of_a_trace_that_is_not_there_is_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["plot_trace", str(tmp_path / "t.jsonl"), str(tmp_path / "t.svg")])
    assert plot_main() == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 't.jsonl'}: No such file or directory\n"
