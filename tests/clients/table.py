"""The table of what came out: on the terminal, and between two comments of the server's page in both languages."""

from typing import Any

from common.measuring.recipe import ROOT

RESULTS = ROOT / "v0_4_http" / "measurements" / "clients.json"
PAGES = tuple(ROOT / "docs" / folder / "server.md" for folder in ("", "zh"))
OPENING, CLOSING = "<!-- clients: python -m tests.clients --markdown -->", "<!-- /clients -->"
HEADER = ("client", "tried", "outcome")


def rows(results: dict[str, Any]) -> list[tuple[str, str, str]]:
    """A row for each thing that was tried; the client is named in its first one."""
    found = []
    for client in results["clients"]:
        name = " ".join(filter(None, (client["client"], client["version"])))
        for entry in client["tries"]:
            found.append((name, entry["tried"], _outcome(entry)))
            name = ""
    return found


def _outcome(entry: dict[str, str]) -> str:
    match entry["outcome"]:
        case "works with":
            return f"works with {entry['with']}"
        case "refused by design" | "fails" | "not installed" as outcome:
            return f"{outcome}: {entry['said']}"
        case outcome:
            return outcome


def markdown(results: dict[str, Any]) -> str:
    """The table, and under it when and with what it was made."""
    lines = [HEADER, ("---",) * len(HEADER), *rows(results)]
    made = results["recipe"]
    machine = f"{made['versions']['python']}, {made['machine']['system']}"
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"{table}\n\nTried on {made['date']} with Python {machine}, against commit {made['commit']}.\n"


def with_table(page: str, results: dict[str, Any]) -> str:
    """`page` with this table between the two comments."""
    before, opening, rest = page.partition(OPENING)
    _, closing, after = rest.partition(CLOSING)
    if not (opening and closing):
        raise LookupError(f"the page has no {OPENING} ... {CLOSING}")
    return f"{before}{opening}\n\n{markdown(results)}\n{closing}{after}"


def write_pages(results: dict[str, Any]) -> None:
    """Write it into the pages."""
    for page in PAGES:
        page.write_text(with_table(page.read_text(encoding="utf-8"), results), encoding="utf-8")


def show(results: dict[str, Any]) -> None:
    """Print it."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*HEADER, show_lines=True)
    for row in rows(results):
        table.add_row(*map(escape, row))
    Console().print(table)
