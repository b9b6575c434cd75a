"""The closing table of the demo: the same tokens from every milestone that is asked."""

import json

import pytest

from tools import demo


@pytest.fixture
def questions(tmp_path):
    file = tmp_path / "questions.txt"
    file.write_text("Hi\nHow are you?\n")
    return file


def test_every_milestone_has_a_row_and_the_answers_are_printed_once(tiny, questions, capsys):
    names = ["v0_1_single_request", "v0_3_scheduler"]
    code = demo.main(["v0_1", names[1], "--prompts", str(questions), "--max-tokens", "5", "--model", str(tiny.folder)])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert [line.split()[0] for line in err.split("\n") if line.strip().startswith("v0_")] == names
    assert "The same 10 tokens from each." in err
    assert out.count("\n") >= 2


def test_figures_are_medians_over_the_rounds_and_are_written_with_their_recipe(
    questions, tmp_path, capsys, monkeypatch
):
    seconds = iter([2.0, 8.0, 4.0])

    def run(*_):
        return {"seconds": next(seconds), "waits": [0.5, 1.5], "token_ids": [[1] * 30, [2] * 10], "texts": ["a", "b"]}

    monkeypatch.setattr(demo, "_run", run)
    out = tmp_path / "demo.json"
    assert demo.main(["v0_2", "--repeats", "3", "--prompts", str(questions), "--out", str(out)]) == 0
    [row] = [line.split() for line in capsys.readouterr().err.split("\n") if "tok/s" in line]
    assert row == ["v0_2_block_manager", "4.0", "10.0", "tok/s", "1.00", "s", "1.50", "s"]
    written = json.loads(out.read_text())
    assert written["recipe"]["settings"] | {"num_questions": 2, "repeats": 3} == written["recipe"]["settings"]
    assert written["milestones"]["v0_2_block_manager"]["rate"] == {"median": 10.0, "min": 5.0, "max": 20.0}
    assert demo.main(["--repeats", "0", "--prompts", str(questions)]) == 1
    assert capsys.readouterr().err == "error: repeats must be at least 1, got 0.\n"


def test_a_milestone_that_gives_other_tokens_is_named_and_the_exit_code_is_1(questions, capsys, monkeypatch):
    def run(name, *_):
        tokens = [[1], [2]] if name == "v0_1_single_request" else [[1], [3]]
        return {"seconds": 1.0, "waits": [0.5, 1.0], "token_ids": tokens, "texts": ["a", "b"]}

    monkeypatch.setattr(demo, "_run", run)
    assert demo.main(["v0_1_single_request", "v0_2_block_manager", "--prompts", str(questions)]) == 1
    assert "v0_2_block_manager gave other tokens than v0_1_single_request" in capsys.readouterr().err


def test_an_unknown_milestone_is_refused_with_the_known_ones(questions, capsys):
    assert demo.main(["v0_99", "--prompts", str(questions)]) == 1
    assert "There is no milestone v0_99: choose from v0_1_single_request" in capsys.readouterr().err


def test_a_number_of_tokens_that_cannot_be_is_refused_before_anything_runs(questions, capsys):
    assert demo.main(["--max-tokens", "0", "--prompts", str(questions)]) == 1
    assert capsys.readouterr().err == "error: max_tokens must be at least 1, got 0.\n"


def test_a_milestone_that_fails_is_named(questions, capsys):
    assert demo.main(["v0_1_single_request", "--prompts", str(questions), "--model", "/nowhere"]) == 1
    assert "v0_1_single_request ended with exit code 1" in capsys.readouterr().err
