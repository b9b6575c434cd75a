"""The recording's script: what is missing, what failed, and what is too large is said (its two tools are played)."""

import json

import pytest

from common.errors import ModelError
from tools import record

# Ends as the recorded command ends, and writes a cast.
ASCIINEMA = """#!/bin/bash
while [ "$1" != -c ]; do shift; done
status=${2##*> }
echo OUTCOME > "$status"
printf '%s\\n' '{"version": 2}' '[0.5, "o", "$ "]' '[0.75, "i", "x"]' '[1.0, "o", "é"]' > "$3"
"""
AGG = """#!/bin/bash
printf GIF > "${@: -1}"
cp "${@: -2:1}" "$(dirname "$0")/drawn.cast"
"""


def tools(folder, outcome):
    """An asciinema and an agg in this folder."""
    folder.mkdir()
    for name, script in {"asciinema": ASCIINEMA.replace("OUTCOME", str(outcome)), "agg": AGG}.items():
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    return folder


def test_a_recording_is_a_cast_and_a_gif(tmp_path, capsys):
    record._record(tmp_path, tools(tmp_path / "bin", 0))
    assert (tmp_path / "demo.gif").read_text() == "GIF"
    assert "demo.gif: 3 bytes" in capsys.readouterr().out
    assert not (tmp_path / "demo.status").exists()


def test_the_gif_begins_with_the_last_screen_and_the_cast_does_not(tmp_path):
    record._record(tmp_path, tools(tmp_path / "bin", 0))
    assert len((tmp_path / "demo.cast").read_text(encoding="utf-8").splitlines()) == 4
    header, *events = (tmp_path / "bin" / "drawn.cast").read_text(encoding="utf-8").splitlines()
    assert header == '{"version": 2}'
    assert [json.loads(event) for event in events] == [
        [0.0, "o", "$ é"],
        [1.5, "o", "\x1bc"],
        [2.0, "o", "$ "],
        [2.25, "i", "x"],
        [2.5, "o", "é"],
    ]


def test_a_gif_is_made_again_from_a_cast_without_recording(tmp_path, monkeypatch):
    binaries = tools(tmp_path / "bin", 0)
    record._record(tmp_path, binaries)
    (tmp_path / "demo.gif").unlink()
    (binaries / "asciinema").unlink()
    monkeypatch.setattr(record.sys, "executable", str(binaries / "python"))
    assert record.main(["--gif-only", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "demo.gif").read_text() == "GIF"


def test_a_command_that_fails_is_no_recording(tmp_path):
    with pytest.raises(ModelError, match="The recorded command failed"):
        record._record(tmp_path, tools(tmp_path / "bin", 1))
    assert not (tmp_path / "demo.gif").exists()


def test_a_gif_that_is_too_large_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "MAX_BYTES", 2)
    with pytest.raises(ModelError, match=r"demo.gif has 3 bytes, more than 2"):
        record._record(tmp_path, tools(tmp_path / "bin", 0))


def test_without_its_tools_it_says_what_to_install(tmp_path):
    with pytest.raises(ModelError, match=r"asciinema is not there: run `pip install -e '\.\[recording\]'`"):
        record._record(tmp_path, tmp_path)


def test_the_first_frame_of_the_gif_in_the_documents_shows_something():
    image = pytest.importorskip("PIL.Image").open(record.ROOT / "docs" / "img" / "demo.gif")
    width, height = image.size
    bright = sum(image.convert("L").histogram()[100:])
    assert bright > 0.02 * width * height
