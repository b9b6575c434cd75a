"""`--trace` and the command line of many prompts, as a user meets them."""

import io
import json

import pytest

from common.sampling_params import SamplingParams
from tests.conftest import ROOT
from tests.kit.memory import Watched, without_garbage_collector
from tests.kit.models import Successor
from tests.kit.tokenizers import byte_tokenizer, stream
from v0_3_scheduler import LLM, LLMEngine
from v0_3_scheduler.generate import main
from v0_3_scheduler.trace import tracer


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


def test_an_engine_that_was_traced_is_freed_at_once():
    watched, lines = [], io.StringIO()
    with without_garbage_collector():
        llm = LLM(Watched(watched), tokenizer=byte_tokenizer())
        llm.engine.on_step = tracer(llm.engine.scheduler, None, lines)
        llm.generate(["Hi"], SamplingParams(temperature=0.0, max_tokens=3), use_tqdm=False)
        del llm
        assert [what for what, is_there in watched if is_there() is not None] == []
    assert len(lines.getvalue().splitlines()) == 3


def test_the_lessons_three_requests_share_a_step_and_lose_blocks_as_the_page_says(monkeypatch):
    engine = LLMEngine(Successor(), tokenizer=byte_tokenizer(), num_blocks=8, max_num_batched_tokens=16)
    kv_cache, steps = engine.model_runner.kv_cache, []
    begin_step = kv_cache.begin_step

    def remember(block_tables, query_lens, context_lens):
        begin_step(block_tables, query_lens, context_lens)
        batches = [(batch.start, batch.stop, list(tables.shape)) for batch, tables, _ in kv_cache.decode_batches]
        steps.append((block_tables, query_lens, context_lens, kv_cache.slot_mapping.tolist(), batches))

    monkeypatch.setattr(kv_cache, "begin_step", remember)
    texts = dict.fromkeys("ABC", "")
    for name, prompt_len, max_tokens in (("A", 37, 20), ("B", 26, 16), ("C", 20, 12)):
        engine.add_request(name, [65] * prompt_len, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    while engine.has_unfinished_requests():
        for output in engine.step():
            texts[output.request_id] += output.outputs[0].text
    # Step 5: decodes first, B before A as it has fewer blocks, and both padded to three; then C's last six tokens.
    assert steps[5] == (
        [[3, 4], [0, 1, 2], [5, 6]],
        [1, 1, 6],
        [28, 40, 20],
        [75, 39, 94, 95, 96, 97, 98, 99],
        [(0, 2, [2, 3])],
    )
    assert steps[14][0] == [[3, 4, 7], [0, 1, 2, 6]], "A has taken one of C's two blocks"
    assert [sum(query_lens) for _, query_lens, _, _, _ in steps[19:21]] == [1 + 15, 1 + 14]
    assert texts == {"A": "BCDEFGHIJKLMNOPQRSTU", "B": "BCDEFGHIJKLMNOPQ", "C": "BCDEFGHIJKLM"}


def test_the_run_under_pressure_computes_114_tokens_twice():
    trace = ROOT / "v0_3_scheduler" / "measurements" / "pressure.jsonl"
    entries = [json.loads(line) for line in trace.read_text().splitlines()]
    assert sum(entry["prefill"] + entry["decode"] for entry in entries) == 575 + 114
    assert entries[40]["scheduled"] == {"5/0": 66, "6/0": 50, "7/0": 39}
