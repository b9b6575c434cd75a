"""Recordings in the site's pages: frames that play them, and an end of the build where one is missing."""

import pytest
from replay import expand, web_files
from sources import SourceError

from tools.milestones import load_ledger

LINE = "--replay-- recordings/a.jsonl | Two requests & one | Look at *this*."


@pytest.fixture
def docs(tmp_path):
    (tmp_path / "recordings").mkdir()
    (tmp_path / "recordings" / "a.jsonl").write_text("{}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("page", "source"),
    [("index.html", "visualizer/index.html"), ("milestones/v0_8/index.html", "../../visualizer/index.html")],
)
def test_a_replay_is_a_frame_with_the_recordings_address_seen_from_the_page(docs, page, source):
    text = expand(f"before\n\n{LINE}\n\nafter", page, docs)
    address = f"{source}?recording=../recordings/a.jsonl"
    assert f'<iframe class="replay" src="{address}&amp;embed" title="Two requests &amp; one"' in text
    assert f'Look at *this*. <a href="{source}?recording=../recordings/a.jsonl">' in text
    assert text.startswith("before\n\n")
    assert text.endswith("\n\nafter")


def test_within_code_it_is_code(docs):
    text = f"```\n{LINE}\n```"
    assert expand(text, "index.html", docs) == text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--replay-- recordings/b.jsonl | b | c", "no recording recordings/b.jsonl"),
        ("--replay-- recordings/a.jsonl | b", "a file, a title and a caption"),
        ("--replay-- recordings/a.jsonl | | c", "a file, a title and a caption"),
    ],
)
def test_what_cannot_be_played_ends_the_build(docs, line, message):
    with pytest.raises(SourceError, match=message):
        expand(line, "index.html", docs)


def test_the_sites_page_is_the_newest_milestones_byte_for_byte():
    from tests.conftest import ROOT

    newest = load_ledger(ROOT)[-1].name
    files = web_files(ROOT)
    assert {"index.html", "main.js", "style.css"} <= {path.name for path in files}
    assert {path.parent for path in files} == {ROOT / newest / "web"}
