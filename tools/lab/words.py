"""What a failed test says, in a learner's words: what was expected, what came, and where to look."""

import re
from pathlib import Path

from tools.lab.tasks import ROOT
from tools.lab.trial import Failure, Report

CODE = re.compile(r"^[a-z]{3}_\d+(?:_\d+)*_")  # `sch_6_`: the number of a case, of no use here
RAISES = re.compile(r"DID NOT RAISE (?:<class ')?(?:[\w.]+\.)?(?P<name>\w+)")
OPERATORS = {"in": "something in {}", "not in": "something not in {}", "is": "the very same object as {}"}
NOT_WRITTEN = re.compile(r"Task (?P<number>\d+): (?P<name>[\w.]+)\.")


def sentence(test: str) -> str:
    """A test's name as a sentence: `...::test_sch_6_victims_are_the_newest[3]` as `Victims are the newest`."""
    name = test.split("::")[-1].partition("[")[0].removeprefix("test_")
    words = CODE.sub("", name).replace("_", " ")
    return words[:1].upper() + words[1:]


def first_failure(report: Report) -> list[str]:
    """The lines that tell of the first test that fails."""
    if report.stuck is not None:
        test, place = report.stuck
        lines = [sentence(test), "  It did not end: a loop that never stops?"]
        if place is not None:
            lines.append(f"  It was at {_where(place[0], place[1])}, in {place[2]}.")
        return lines
    failure = report.failures[0]
    lines = [sentence(failure.test) if "::" in failure.test else "The tests could not begin"]
    interesting = {name: value for name, value in failure.arguments.items() if len(value) < 60}
    if interesting:
        lines.append("  With:     " + ", ".join(f"{name} = {value}" for name, value in interesting.items()))
    lines += [f"  {line}" for line in _what_happened(failure)]
    if failure.test_place is not None:
        lines.append(f"  The test: {_where(*failure.test_place)}")
        lines += [f"      {line}" for line in failure.statement.split("\n")[:6]]
    if failure.place is not None and not NOT_WRITTEN.match(failure.message):
        path, line, name, text = failure.place
        lines.append(f"  In yours: {_where(path, line)}" + (f", in {name}" if name else ""))
        lines += [f"      {text}"] if text else []
        lines += [f"    By way of {' → '.join(failure.way[-5:-1])}."] if len(failure.way) > 1 else []
    return lines


def _what_happened(failure: Failure) -> list[str]:
    missing = NOT_WRITTEN.match(failure.message)
    if failure.kind == "NotImplementedError" and missing:
        return [f"{missing['name']} is not written yet: it is task {missing['number']}."]
    if failure.compared is not None:
        operator, left, right = failure.compared
        if operator in ("==", "is", "in"):
            expected = OPERATORS.get(operator, "{}").format(right)
            return [f"Expected: {expected}", f"Got:      {left}"]
        return [f"Expected: something {operator} {right}", f"Got:      {left}"]
    if raised := RAISES.search(failure.message):
        return [f"Expected: an error of the kind {raised['name']}", "Got:      none, the call went through"]
    message = failure.message.strip() or "(without a message)"
    if failure.kind == "AssertionError":
        return _assertion(failure, message)
    expected = "another error" if failure.statement.startswith("with pytest.raises") else "no error"
    return [f"Expected: {expected}", f"Got:      {failure.kind}: {_first_lines(message, 3)}"]


def _assertion(failure: Failure, message: str) -> list[str]:
    """An assertion without two sides: an invariant of the engine, a tensor, a message, a plain condition."""
    if "did not match" in message or "Expected regex" in message:
        sides = dict(line.strip().partition(": ")[::2] for line in message.split("\n") if ": " in line)
        pattern, actual = sides.get("Expected regex", "another"), sides.get("Actual message", message)
        return [f"Expected: an error with a text that matches the pattern {pattern}", f"Got:      {actual}"]
    if "not close" in message or "are not equal" in message:
        numbers = [
            line for line in message.split("\n") if line.startswith(("Mismatched", "Greatest", "Tensor", "The "))
        ]
        return ["Expected: the same tensor", "Got:      another one", *numbers[:4]]
    if failure.place is not None:
        return [f"An invariant does not hold: {_first_lines(message, 1)}"]
    plain = message.split("\n")[0].removeprefix("assert ")
    return [f"Expected: this to be true: {plain}"]


def _first_lines(text: str, number: int) -> str:
    return "\n    ".join([line for line in text.split("\n") if line.strip()][:number])[:1000]


def _where(path: str, line: int) -> str:
    file = Path(path)
    return f"{file.relative_to(ROOT) if file.is_relative_to(ROOT) else file}, line {line}"
