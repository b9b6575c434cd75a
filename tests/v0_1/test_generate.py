"""The command line, as a user meets it: in a process of its own."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.kit.tokenizers import byte_tokenizer
from v0_1_single_request.generate import main


def run(*args, **options):
    command = [sys.executable, "-m", "v0_1_single_request", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


@pytest.fixture
def call(capsys, monkeypatch):
    """The command line in this process: `(exit code, stdout, stderr)`."""

    def run_here(*args, columns=120):
        monkeypatch.setenv("COLUMNS", str(columns))
        code = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_here


def test_the_answer_goes_to_stdout_and_the_table_to_stderr(tiny):
    done = run("--raw", "Hi", "--model", tiny.folder, "--max-tokens", 5, "--ignore-eos")
    assert done.returncode == 0, done.stderr
    assert done.stdout == byte_tokenizer().decode(tiny.tokens([72, 105], 5)) + "\n"
    for title in ("prompt", "output", "ended by", "TTFT", "decode", "KV reserved", "KV used"):
        assert title in done.stderr


def test_the_table_fits_into_80_columns(call, tiny, monkeypatch):
    _, _, err = call("--raw", "Hi", "--model", tiny.folder, "--max-tokens", 9, "--ignore-eos", columns=80)
    assert "…" not in err
    titles, _, row = [line for line in err.split("\n") if line.strip()][-3:]
    assert titles.split() == ["prompt", "output", "ended", "by", "TTFT", "decode", "KV", "reserved", "KV", "used"]
    assert len(row) <= 80


def test_white_space_of_a_prompt_on_stdin_is_kept_but_for_the_last_newline(tiny):
    done = run("--raw", "--model", tiny.folder, "--max-tokens", 1, input=" Hi\n  \n")
    assert done.stderr.rstrip().split("\n")[-1].split()[0] == str(len(" Hi\n  "))


def test_the_prompt_may_come_on_stdin(tiny):
    done = run("--raw", "--model", tiny.folder, "--max-tokens", 5, "--ignore-eos", input="Hi\n")
    assert done.stdout == byte_tokenizer().decode(tiny.tokens([72, 105], 5)) + "\n"


def test_several_prompts_are_served_one_after_the_other(call, tiny):
    code, out, err = call("--raw", "Hi", "Ho", "--model", tiny.folder, "--max-tokens", 3, "--ignore-eos")
    texts = [byte_tokenizer().decode(tiny.tokens(prompt, 3)) for prompt in ([72, 105], [72, 111])]
    assert (code, out) == (0, "".join(text + "\n" for text in texts))
    assert "> Hi" in err
    assert "> Ho" in err


def test_without_raw_the_prompt_goes_through_the_chat_template(call, tiny):
    _, _, err = call("Hi", "--model", tiny.folder, "--max-tokens", 1)
    num_tokens = len(byte_tokenizer().chat_token_ids([{"role": "user", "content": "Hi"}]))
    assert f" {num_tokens} " in err


def test_the_table_says_what_the_slab_reserves_and_uses(call, tiny):
    # 2 layers, 2 KV heads of 16: 2 * 2 * 2 * 16 * 4 = 512 bytes a token, 512 tokens of context.
    _, _, err = call("--raw", "Hi", "--model", tiny.folder, "--max-tokens", 9, "--ignore-eos", "--max-model-len", 512)
    assert "256.00 KiB" in err
    assert "(2.0%)" in err  # 2 + 9 - 1 = 10 of 512


def test_choices_are_told_apart(call, tiny):
    _, out, _ = call("--raw", "Hi", "--model", tiny.folder, "--max-tokens", 2, "--n", 2, "--ignore-eos")
    text = byte_tokenizer().decode(tiny.tokens([72, 105], 2))
    assert out == f"{text}\n--- choice 1 ---\n{text}\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--temperature", "-1"], "error: temperature must be at least 0 and at most 2, got -1.0."),
        (["--model", "/no/such/folder"], "error: There is no folder /no/such/folder"),
        (["--model", "no/such/file.gguf"], "error: There is no file no/such/file.gguf"),
        (["--stop", ""], "error: stop must not hold an empty string"),
    ],
)
def test_a_wrong_flag_is_told_in_one_sentence(call, args, message):
    code, out, err = call("Hi", *args)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith(message)
    assert err.removeprefix("Loading the model...\n").count("\n") == 1


def test_a_prompt_that_is_too_long_is_told_with_both_numbers(call, tiny):
    code, _, err = call("--raw", "x" * 300, "--model", tiny.folder, "--max-model-len", 64)
    assert code == 1
    assert "The prompt has 300 tokens, but the context holds 64 tokens" in err


def test_another_architecture_is_told_by_name(call, tmp_path):
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    code, _, err = call("Hi", "--model", tmp_path)
    assert code == 1
    assert "holds a qwen2 model (Qwen2ForCausalLM), but this engine serves Llama models" in err


def test_no_prompt_at_all_is_told(call, monkeypatch, tiny):
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115
    code, _, err = call("--model", tiny.folder)
    assert (code, err) == (1, "error: There is no prompt: give one as an argument, or on standard input.\n")


def test_ctrl_c_ends_cleanly_in_the_middle_of_an_answer(tiny):
    command = ["--raw", "Hi", "--model", str(tiny.folder), "--max-tokens", "500", "--ignore-eos"]
    with subprocess.Popen(
        [sys.executable, "-m", "v0_1_single_request", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        child.stdout.read(1)  # the answer has begun
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    # Nothing is left to interrupt if the answer was faster than the signal.
    assert child.returncode in (0, 130)
    assert b"Traceback" not in err


def test_a_closed_pipe_ends_cleanly(tiny):
    command = f"{sys.executable} -m v0_1_single_request --raw Hi --ignore-eos --max-tokens 500 --model {tiny.folder}"
    done = subprocess.run(f"{command} | head -c 1", shell=True, capture_output=True, timeout=120)
    assert b"Traceback" not in done.stderr
    assert b"Exception" not in done.stderr
