"""The animation of the pool, which the pages and the README show: it is made from the trace that lies beside it."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from common.errors import ModelError
from tests.conftest import ROOT
from v0_3_scheduler.measurements.animate_pool import animate, main
from v0_3_scheduler.measurements.pool_story import captions, tenancies

TRACE = ROOT / "v0_3_scheduler" / "measurements" / "pressure.jsonl"
SVG = ROOT / "docs" / "img" / "pool.svg"


def entry(scheduled, tables, queue=(), preempted=()):
    return {
        "scheduled": scheduled,
        "tables": tables,
        "queue": list(queue),
        "preempted": list(preempted),
        "free": 3 - sum(len(table) for table in tables.values()),
    }


# Two prompts of 4 in blocks of 4, three blocks: both need a second block for their next token, and one is left.
SHORT = [
    entry({"0/0": 4, "1/0": 4}, {"0/0": [0], "1/0": [1]}, queue=["2/0"]),
    entry({"0/0": 1}, {"0/0": [0, 2]}, queue=["1/0", "2/0"], preempted=["1/0"]),
    entry({"0/0": 1}, {}, queue=["1/0", "2/0"]),
    entry({"1/0": 5, "2/0": 3}, {"1/0": [1, 0], "2/0": [2]}),
    entry({"1/0": 1, "2/0": 1}, {}),
]


@pytest.fixture(scope="module")
def entries():
    return [json.loads(line) for line in TRACE.read_text().splitlines()]


def test_the_committed_picture_is_made_from_the_committed_trace(entries):
    assert SVG.read_text() == animate(entries)


def test_the_command_draws_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["animate_pool", str(TRACE), str(tmp_path / "pool.svg")])
    assert main() == 0
    assert (tmp_path / "pool.svg").read_text() == SVG.read_text()


def test_the_run_was_under_pressure_and_the_picture_says_who_gave_way(entries):
    assert [(i, entry["preempted"]) for i, entry in enumerate(entries) if entry["preempted"]] == [
        (14, ["6/0"]),
        (29, ["5/0"]),
    ]
    text = "".join(ElementTree.fromstring(SVG.read_text()).itertext())
    assert "G, the newest, is preempted: 4 blocks go back." in text
    assert "F, the newest, is preempted: 5 blocks go back." in text


def test_every_block_that_is_owned_is_drawn_in_every_step(entries):
    drawn = [set() for _ in entries]
    for tenancy in tenancies(entries, 16):
        for step in range(tenancy.first, tenancy.last + 1):
            drawn[step].add((tenancy.block, tenancy.owner))
    owned = [{(block, name) for name, table in entry["tables"].items() for block in table} for entry in entries]
    assert drawn == owned
    names = {name for tenancy in tenancies(entries, 16) for name in [tenancy.owner]}
    assert len(names) == 8


def test_a_block_fills_up_and_a_victims_blocks_are_marked():
    found = [(t.block, t.owner, t.first, t.last, t.levels, t.is_preempted) for t in tenancies(SHORT, 4)]
    assert found == [
        (0, "0/0", 0, 1, [4, 4], False),
        (0, "1/0", 3, 3, [1], False),
        (1, "1/0", 0, 0, [4], True),
        (1, "1/0", 3, 3, [4], False),
        (2, "0/0", 1, 1, [1], False),
        (2, "2/0", 3, 3, [3], False),
    ]


def test_the_captions_say_what_happens():
    assert captions(SHORT, {"0/0": "A", "1/0": "B", "2/0": "C"}) == {
        0: ("A and B start.", "C has to wait."),
        1: ("A needs a block, and none is free.", "B, the newest, is preempted: 1 block goes back."),
        2: ("A has ended. Its 2 blocks are free.", ""),
        3: ("There is room for B and C.", "B computes prompt and text again."),
        4: ("All are answered. The text is the same", "as in a pool that never runs out of blocks."),
    }


def test_it_can_be_shared_small_moving_without_scripts_and_still_for_who_asks():
    svg = SVG.read_text()
    assert SVG.stat().st_size < 150_000
    seconds = float(re.search(r"animation:([\d.]+)s", svg)[1])
    assert 12 <= seconds <= 20
    assert "prefers-color-scheme:dark" in svg
    assert "prefers-reduced-motion:reduce" in svg
    assert not re.search(r"<script|href=|url\((?!#)", svg)
    ids = [element.get("id") for element in ElementTree.fromstring(svg).iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"animation-name:(\w+)", svg)) == set(re.findall(r"@keyframes (\w+)", svg)) <= set(ids)
    sizes = [float(size) for size in re.findall(r"font-size[=:]\"?([\d.]+)", svg)]
    assert min(sizes) >= 14, "readable at 390 pixels"


def test_what_cannot_be_drawn_is_one_sentence(tmp_path, monkeypatch, capsys):
    with pytest.raises(ModelError, match="no block tables"):
        animate([{"scheduled": {}, "queue": []}])
    monkeypatch.setattr("sys.argv", ["animate_pool", str(tmp_path / "t.jsonl"), str(tmp_path / "pool.svg")])
    assert main() == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 't.jsonl'}: No such file or directory\n"
