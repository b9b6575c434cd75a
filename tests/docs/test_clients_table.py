"""The table of clients on both languages' page of the server is that of the results; and what makes a try a success."""

import json

import pytest

from tests.clients import table
from tests.clients.scenarios import scenario

SERVER = scenario.Server("http://127.0.0.1:8000", "m", "folder", 2, "q", "a b", [3, 2], "p", " c d", [1, 2])
RESULTS = {
    "recipe": {"date": "2026-11-30", "commit": "abc", "versions": {"python": "3.11"}, "machine": {"system": "Linux"}},
    "clients": [
        {
            "client": "one",
            "version": "1.0",
            "tries": [
                {"tried": "a chat", "outcome": "works"},
                {"tried": "a stream", "outcome": "works with", "with": "`--flag`"},
                {"tried": "tools", "outcome": "refused by design", "said": "there are no tools."},
            ],
        },
        {"client": "two", "version": None, "tries": [{"tried": "", "outcome": "not installed", "said": "a | b"}]},
    ],
}


@pytest.mark.parametrize("path", table.PAGES, ids=lambda path: path.parts[-2])
def test_the_pages_table_is_that_of_the_results(path):
    results = json.loads(table.RESULTS.read_text())
    page = path.read_text(encoding="utf-8")
    assert table.with_table(page, results) == page, "run python -m tests.clients --markdown"


def test_no_client_of_the_results_fails():
    results = json.loads(table.RESULTS.read_text())
    assert {entry["outcome"] for client in results["clients"] for entry in client["tries"]} <= {
        *("works", "works with", "refused by design"),
    }


def test_a_client_has_a_row_for_each_thing_that_was_tried_and_is_named_in_the_first():
    assert table.rows(RESULTS) == [
        ("one 1.0", "a chat", "works"),
        ("", "a stream", "works with `--flag`"),
        ("", "tools", "refused by design: there are no tools."),
        ("two", "", "not installed: a | b"),
    ]
    assert "| two |  | not installed: a \\| b |\n\nTried on 2026-11-30 with" in table.markdown(RESULTS)


def test_only_what_is_between_the_comments_is_written():
    page = f"before\n{table.OPENING}\nold\n{table.CLOSING}\nafter\n"
    written = table.with_table(page, RESULTS)
    assert written == f"before\n{table.OPENING}\n\n{table.markdown(RESULTS)}\n{table.CLOSING}\nafter\n"
    assert table.with_table(written, RESULTS) == written
    with pytest.raises(LookupError, match="the page has no"):
        table.with_table("nothing", RESULTS)


class Refusal(Exception):  # noqa: N818
    """As OpenAI's clients tell one: with the answer's body."""

    body = {"message": "tools is not supported: there are no tools.", "type": "invalid_request_error"}  # noqa: RUF012


def fail(error):
    def check(server):
        raise error

    return check


def told(outcome, check, saying=None):
    entry = {"tried": "x", "outcome": outcome, "said": saying or ""}
    found = scenario.outcome(entry, check, saying, SERVER)
    return found["outcome"], found["said"]


def test_a_try_fails_if_what_has_to_work_raises_or_what_has_to_be_refused_is_not():
    assert told("works", lambda server: None) == ("works", "")
    assert told("works", fail(AssertionError("text: 1 is not 2"))) == ("fails", "AssertionError: text: 1 is not 2")
    assert told("refused by design", lambda server: None, "no tools") == ("fails", "it was not refused")
    assert told("refused by design", fail(ValueError("lost")), "no tools") == ("fails", "ValueError: lost")


def test_a_refusal_is_told_in_the_servers_own_sentence_wherever_the_client_keeps_it():
    sentence = "tools is not supported: there are no tools."
    printed = """400: {'error': {'message': "tools is not supported: there are no tools.", 'type': 'x'}}"""
    wrapped = ValueError("there are no tools, it says")
    wrapped.__cause__ = Refusal("400")
    for error in (Refusal(f"400: {sentence}"), ValueError(printed), wrapped):
        assert told("refused by design", fail(error), "there are no tools") == ("refused by design", sentence)
    assert told("refused by design", fail(ValueError("no tools")), "no tools") == ("refused by design", "no tools")
