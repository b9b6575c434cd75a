"""What the page asks of Python: a JSON text in, a JSON text out. Runs in the worker (`worker.js`), and in the tests.

    {"do": "functions", "milestone": ...}                           the functions that can be edited
    {"do": "diffs", "milestone": ..., "edits": {...}}                how edits differ from the original, without a run
    {"do": "run", "milestone": ..., "settings": {...}, "edits": {...}, "challenge": id or null}

Files are read from the folder above this one, `policies/<milestone>/` and `cost_model.json`, as the site has them.
While the site is built, `use_folder` says where they lie in the repository.
"""

import contextlib
import difflib
import io
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import challenges
from .cost import CostModel
from .policy import ORDER, EditError, Policy, Sources, function_of, functions
from .scenario import SettingError, Settings, scripts
from .simulation import Run, run

FOLDER = Path(__file__).resolve().parents[1]
MAX_PRINTED = 10_000  # characters
_milestones: dict[str, Path] = {}


def use_folder(folder: Path, milestones: Mapping[str, Path]) -> None:
    """Read the cost model from this folder, and each milestone's files from its own."""
    global FOLDER
    FOLDER = folder
    _milestones.update(milestones)
    sources_of.cache_clear()
    cost_model.cache_clear()
    original_metrics.cache_clear()


def handle(request: str) -> str:
    """Answer one request; never raises for what a reader can do wrong."""
    asked = json.loads(request)
    answer = {"functions": _functions, "diffs": _diffs, "run": _run}[asked["do"]](asked)
    return json.dumps(answer)


@lru_cache
def sources_of(milestone: str) -> Sources:
    """The files of a milestone."""
    folder = _milestones.get(milestone, FOLDER / "policies" / milestone)
    files = {name: folder / name for name in ORDER}
    return {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}


@lru_cache
def cost_model() -> CostModel:
    """The fitted one."""
    return CostModel(json.loads((FOLDER / "cost_model.json").read_text(encoding="utf-8"))["ms"])


def _functions(asked: dict[str, Any]) -> dict[str, Any]:
    found = []
    for file, source in sources_of(asked["milestone"]).items():
        for each in functions(source):
            edit = f"{file}:{each.name}"
            found.append({"edit": edit, "file": file, "name": each.name, "first": each.first, "text": each.text})
    return {"functions": found, "challenges": [each.as_json() for each in challenges.CHALLENGES]}


def _diffs(asked: dict[str, Any]) -> dict[str, Any]:
    return {"diffs": diffs(asked["milestone"], asked["edits"])}


def _run(asked: dict[str, Any]) -> dict[str, Any]:
    printed = io.StringIO()
    milestone, edits = asked["milestone"], asked.get("edits") or {}
    answer: dict[str, Any] = {"error": None, "original": None, "verdict": None}
    try:
        settings = Settings.of(asked["settings"] | {"milestone": milestone})
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            result = run_policy(milestone, settings, edits)
        answer |= result.as_json()
        if edits:
            before = original_metrics(milestone, settings)
            answer["original"] = before
            challenge = challenges.challenge(asked.get("challenge") or "")
            if challenge is not None and result.failure is None:
                answer["verdict"] = challenge.verdict(before, result.metrics)
    except EditError as error:
        answer["error"] = {"kind": "edit", "message": str(error), "edit": error.edit, "line": error.line}
    except SettingError as error:
        answer["error"] = {"kind": "setting", "message": str(error), "edit": None, "line": None}
    answer["diffs"] = diffs(milestone, edits)
    answer["printed"] = printed.getvalue()[:MAX_PRINTED]
    return answer


def run_policy(milestone: str, settings: Settings, edits: dict[str, str]) -> Run:
    """The milestone's files with these edits, on a setting."""
    scripts(settings)  # a list of requests that is wrong is told before anything else
    policy = Policy(milestone, sources_of(milestone), edits)
    try:
        return run(policy, settings, cost_model())
    finally:
        policy.unload()


@lru_cache(maxsize=32)
def original_metrics(milestone: str, settings: Settings) -> dict[str, Any]:
    """What the files give as they are; known again when the reader has changed nothing but the code."""
    return run_policy(milestone, settings, {}).metrics


def diffs(milestone: str, edits: dict[str, str]) -> dict[str, list[str]]:
    """Of each edit against the original: lines as `diff -u` has them, without the head."""
    result = {}
    for edit, text in edits.items():
        file, _, name = edit.partition(":")
        original = function_of(sources_of(milestone).get(file, ""), name)
        before = original.text.split("\n") if original else []
        lines = list(difflib.unified_diff(before, text.strip("\n").split("\n"), n=2, lineterm=""))[2:]
        result[edit] = lines
    return result
