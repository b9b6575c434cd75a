"""Flags made from dataclasses, and what every command line does with its caller's mistakes."""

import argparse
import contextlib
import errno
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from common import cli
from common.errors import ModelError, RequestError
from common.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Args:
    """One field of each kind."""

    model: str | None = field(default=None, metadata={"help": "a folder"})
    num_blocks: int = field(default=7, metadata={"help": "how many"})
    max_model_len: int | None = field(default=None, metadata={"help": "longest"})
    share: float = field(default=0.5, metadata={"help": "up to 90 % of it"})
    device: str = field(default="auto", metadata={"help": "where", "choices": ("auto", "cpu")})
    memory: int = field(default=1, metadata={"help": "in KiB", "type": lambda text: int(text.removesuffix("K"))})
    chunked: bool = field(default=True, metadata={"help": "or not"})
    stop: str | Sequence[str] | None = field(default=(), metadata={"help": "may be repeated"})
    stop_ids: Sequence[int] | None = field(default=(1,), metadata={"help": "may be repeated"})
    names: Sequence[str] = field(default=("a",), metadata={"help": "may be repeated"})
    hidden: int = 3


def parser_of(cls: type = Args, **defaults: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prog")
    cli.add_arguments(parser, cls, title="engine", **defaults)
    return parser


def parse(*argv: str, **defaults: Any) -> Args:
    return cli.from_arguments(Args, parser_of(**defaults).parse_args(argv))


def test_flags_that_are_not_given_keep_the_fields_defaults() -> None:
    assert parse() == Args()


@pytest.mark.parametrize(
    ("argv", "changed"),
    [
        (["--model", "here"], {"model": "here"}),
        (["--num-blocks", "12"], {"num_blocks": 12}),
        (["--num-blocks=0"], {"num_blocks": 0}),
        (["--max-model-len", "64"], {"max_model_len": 64}),
        (["--share", "0.25"], {"share": 0.25}),
        (["--share", "1"], {"share": 1.0}),
        (["--device", "cpu"], {"device": "cpu"}),
        (["--memory", "4K"], {"memory": 4}),
        (["--no-chunked"], {"chunked": False}),
        (["--chunked"], {"chunked": True}),
        (["--stop", "x"], {"stop": ["x"]}),
        (["--stop", "x", "--stop", "y z", "--stop", ""], {"stop": ["x", "y z", ""]}),
        (["--stop-ids", "5", "--stop-ids", "6"], {"stop_ids": [5, 6]}),
        (["--names", "b", "--names", "c"], {"names": ["b", "c"]}),
        (["--num-blocks", "1", "--device", "auto", "--stop-ids", "9"], {"num_blocks": 1, "stop_ids": [9]}),
    ],
)
def test_each_kind_of_field_becomes_a_flag_of_its_type(argv: list[str], changed: dict[str, Any]) -> None:
    made = parse(*argv)
    assert made == Args(**changed)
    for name, value in changed.items():
        assert type(getattr(made, name)) is type(value)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num-blocks", "many"], "argument --num-blocks: invalid int value: 'many'"),
        (["--max-model-len", "1.5"], "argument --max-model-len: invalid int value: '1.5'"),
        (["--share", "half"], "argument --share: invalid float value: 'half'"),
        (["--stop-ids", "x"], "argument --stop-ids: invalid int value: 'x'"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--chunked", "yes"], "unrecognized arguments: yes"),
        (["--hidden", "3"], "unrecognized arguments: --hidden 3"),
    ],
)
def test_a_wrong_value_is_told_on_stderr(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*argv)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_a_command_line_may_have_defaults_of_its_own() -> None:
    made = parse(num_blocks=100, chunked=False, device="cpu")
    assert made == Args(num_blocks=100, chunked=False, device="cpu")
    assert parse("--num-blocks", "5", num_blocks=100) == Args(num_blocks=5)


def test_help_shows_text_defaults_and_choices() -> None:
    text = " ".join(parser_of(num_blocks=100).format_help().split())
    assert "engine:" in text
    assert "--num-blocks INT how many (default: 100)" in text
    assert "--max-model-len INT longest --" in text  # no default to show
    assert "--share FLOAT up to 90 % of it (default: 0.5)" in text
    assert "--device {auto,cpu} where (default: auto)" in text
    assert "--chunked, --no-chunked or not" in text
    assert "--stop STR may be repeated" in text
    assert "--stop-ids INT may be repeated" in text
    assert "hidden" not in text


def test_sampling_params_come_from_flags_and_are_checked() -> None:
    def made(*argv: str) -> SamplingParams:
        parser = parser_of(SamplingParams, temperature=0.0, max_tokens=256)
        return cli.from_arguments(SamplingParams, parser.parse_args(argv))

    assert made() == SamplingParams(temperature=0.0, max_tokens=256)
    argv = ["--temperature", "0.7", "--top-k", "-1", "--stop", "a", "--stop-token-ids", "3", "--stop-token-ids", "4"]
    assert made(*argv, "--ignore-eos", "--no-skip-special-tokens") == SamplingParams(
        temperature=0.7,
        top_k=-1,
        max_tokens=256,
        stop=("a",),
        stop_token_ids=(3, 4),
        ignore_eos=True,
        skip_special_tokens=False,
    )
    with pytest.raises(RequestError, match="at most 2, got 3"):
        made("--temperature", "3")
    with pytest.raises(SystemExit):
        made("--logit-bias", "1")  # no help text, no flag
    with pytest.raises(SystemExit):
        made("--seed", "1")  # the engine's own flag


# run


def failing(error: BaseException) -> Callable[[], None]:
    def main() -> None:
        print("begun")
        raise error

    return main


def test_success_is_zero_and_the_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(lambda: print("done")) == 0
    assert capsys.readouterr() == ("done\n", "")


@pytest.mark.parametrize("error", [ModelError("no such model"), RequestError("no such model", param="model")])
def test_the_callers_mistake_is_one_sentence_on_stderr(error: ValueError, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(failing(error)) == 1
    assert capsys.readouterr() == ("begun\n", "error: no such model\n")


@pytest.mark.parametrize(("load", "says"), [(3.94, True), (2.0, False)])
def test_a_busy_machine_is_told_before_the_work_begins(
    load: float, says: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cli.run(lambda: print("work", file=sys.stderr)) == 0
    warning = (
        "This machine is busy (load 3.9 on 2 cores), so threads may wait for each other. If this is slow, set "
        "OMP_NUM_THREADS=1.\n"
    )
    assert capsys.readouterr().err == (warning if says else "") + "work\n"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # who has set it needs no advice
    assert cli.busy() is None


def test_ctrl_c_ends_quietly(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(failing(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("begun\n", "\ninterrupted\n")


def test_a_reader_that_has_gone_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # run replaces it, and this puts it back
    assert cli.run(failing(BrokenPipeError())) == 141
    sys.stdout.close()
    assert capsys.readouterr().err == ""


def test_a_pipe_that_is_closed_early_leaves_no_trace() -> None:
    program = """
import sys
from common.cli import run

def main():
    print("first", flush=True)
    sys.stdin.readline()
    print("second")  # stays in the buffer, which the interpreter would flush once more at its end

sys.exit(run(main))
"""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=env, text=True, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "first\n"
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.parametrize("error", [ValueError("ours"), RuntimeError("ours"), SystemExit(3)])
def test_a_fault_of_ours_keeps_its_traceback(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        cli.run(failing(error))
    assert caught.value is error


# read_prompt


class Terminal(io.StringIO):
    """Standard input on which nobody writes."""

    def isatty(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> str:
        raise AssertionError("this would wait for ever")


def pipe(content: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(content))


def test_a_prompt_that_is_not_utf_8_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", pipe(b"caf\xe9\n"))
    with pytest.raises(RequestError, match="Standard input is not UTF-8 text: byte 3 is 0xe9"):
        cli.read_prompt()


def test_a_full_disk_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert cli.run(main) == 1
    assert capsys.readouterr().err == "error: No space left on device\n"


def test_an_error_of_the_file_system_names_its_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    missing = tmp_path / "no folder" / "trace.jsonl"
    assert cli.run(lambda: open(missing, "w").close()) == 1
    assert capsys.readouterr().err == f"error: {missing}: No such file or directory\n"


def test_the_prompt_is_read_from_a_pipe_as_it_is_but_for_the_last_newline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", pipe(b"  Why is\nthe sky blue?\n\n"))
    assert cli.read_prompt() == "  Why is\nthe sky blue?\n"


@pytest.mark.parametrize("stdin", [Terminal(), pipe(b""), pipe(b" \n")])
def test_no_prompt_at_all_is_told(stdin: io.TextIOBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(RequestError, match="There is no prompt: give one as an argument, or on standard input"):
        cli.read_prompt()


# The command line of a milestone, in an interpreter of its own


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)


def test_help_loads_no_torch() -> None:
    program = """
import sys
from v0_1_single_request.generate import main
try:
    main(["--help"])
except SystemExit as end:
    print("exit", end.code)
print("heavy", [name for name in ("torch", "transformers", "numpy") if name in sys.modules])
"""
    result = python(program)
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[-2:] == ["exit 0", "heavy []"]
    assert lines[0].startswith("usage: python -m v0_1_single_request ")
    for flag in ("--model", "--dtype", "--max-model-len", "--temperature", "--stop-token-ids", "--raw"):
        assert flag in result.stdout


def test_a_wrong_flag_is_told_before_anything_heavy_is_loaded() -> None:
    program = """
import sys
from v0_1_single_request.generate import main
print(main(["Hi", "--temperature", "9"]), "torch" in sys.modules)
"""
    result = python(program)
    assert result.stdout == "1 False\n"
    assert result.stderr == "error: temperature must be at least 0 and at most 2, got 9.0.\n"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises `KeyboardInterrupt`, as at a terminal; a process in the background may be told to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_unt_11_an_interrupt_that_is_lost_while_loading_ends_it_all_the_same() -> None:
    loaded = []

    def load(interrupted: bool, lost: bool = False) -> None:
        with cli.loading():
            with contextlib.suppress(KeyboardInterrupt if lost else ()):  # as in a callback of the import system
                if interrupted:
                    signal.raise_signal(signal.SIGINT)
            loaded.append((interrupted, lost))

    with pytest.raises(KeyboardInterrupt):
        load(interrupted=True, lost=True)
    with pytest.raises(KeyboardInterrupt):
        load(interrupted=True)
    load(interrupted=False)
    assert loaded == [(True, True), (False, False)]  # what is not lost ends it at once
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
