"""The lab on the pages: each milestone's lesson shows the tasks that the ledger has."""

from pathlib import Path

import lab
import pytest
from sources import SourceError

from tools.lab.tasks import all_tasks, version

ROOT = Path(__file__).resolve().parents[2]
TASKS = all_tasks()


@pytest.mark.parametrize("name", TASKS)
def test_a_lesson_shows_the_tasks_of_the_ledger(name: str) -> None:
    page = (ROOT / "docs" / "milestones" / f"{version(name)}.md").read_text(encoding="utf-8")
    section = page.partition("\n## Write it yourself\n")[2].partition("\n## Check yourself\n")[0]
    assert f"\n--lab-- {version(name)}\n" in section
    assert f"tools.lab start {version(name)}\n" in section
    shown = lab.expand(section, ROOT)
    for task in TASKS[name]:
        assert f"| {task.number} | {task.title} | `{task.functions[0].name}`" in shown
        assert f"| {task.minutes} min |" in shown


def test_a_milestone_without_tasks_ends_the_build() -> None:
    with pytest.raises(SourceError, match="v0_5 has nothing to write"):
        lab.expand("--lab-- v0_5", ROOT)


def test_the_labs_page_and_the_exercises_lead_to_each_other() -> None:
    docs = ROOT / "docs"
    assert "(exercises.md" in (docs / "lab.md").read_text(encoding="utf-8")
    assert "(lab.md)" in (docs / "exercises.md").read_text(encoding="utf-8")
