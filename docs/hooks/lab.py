"""Hook: what there is to write of a milestone, as a table of its tasks in the ledger.

    --lab-- v0_2

A milestone without tasks ends the build.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from sources import SourceError, replace_directives

from tools.lab.tasks import LabError, Task, milestone_with_tasks
from tools.milestones import LedgerError

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """mkdocs calls this with every page's text, before it is read as Markdown."""
    from mkdocs.exceptions import PluginError

    try:
        return expand(markdown, Path(config.config_file_path).parent)
    except (SourceError, LedgerError) as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error


def expand(markdown: str, root: Path) -> str:
    """The text of a page with its tables in place."""

    def replacement(arguments: str) -> str:
        try:
            return table(milestone_with_tasks(arguments, root)[1])
        except LabError as error:
            raise SourceError(str(error)) from error

    return replace_directives(markdown, "lab", replacement)


def table(tasks: list[Task]) -> str:
    """A row for each task."""
    rows = ["| | task | you write | about |", "|---:|---|---|---:|"]
    for task in tasks:
        names = ", ".join(f"`{function.name}`" for function in task.functions)
        rows.append(f"| {task.number} | {task.title} | {names} | {task.minutes} min |")
    return "\n".join(rows) + "\n"
