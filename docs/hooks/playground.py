"""Hook: what the playground needs beside the files of docs/playground/, which mkdocs copies by itself.

    playground/policies/<milestone>/   scheduler, block manager and what they import, byte by byte as in the milestone
    playground/common/                 the files of common/ that those import
    playground/runs/<preset>.json      each preset's run, made while the site is built, by the same simulator: shown
                                       before Python is loaded, and where it can't be
    playground/vendor/                 Pyodide and CodeMirror, if `python -m tools.playground_assets` has fetched them
    playground/manifest.json           which of all that there is, and how large it is

Without the fetched assets the site builds as well; the page then says what is missing.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `mkdocs` does not look in the repository's root
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "playground"))

from simulator.entry import run_policy, use_folder
from simulator.policy import ORDER, function_of, replaced
from simulator.scenario import ARRIVALS, RANGES, Settings

from tools.playground_assets import FILES, VERSIONS, folder_of, is_there

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

FOLDER = "playground"
MILESTONES = {
    "v0_3_scheduler": "v0.3: continuous batching",
    "v0_6_prefix_cache": "v0.6: shared blocks",
    "v0_7_speculative": "v0.7: speculative decoding",
    "v0_8_visualizer": "v0.8: the same with events",
}
COMMON = ("__init__.py", "errors.py", "outputs.py", "sampling_params.py")


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """mkdocs calls this once it knows all files of docs/."""
    from mkdocs.structure.files import File

    root = Path(config.config_file_path).parent
    if not (root / "docs" / FOLDER).is_dir():
        return files
    copied = copied_files(root) | vendored_files(root)
    for address, path in copied.items():
        files.append(File.generated(config, f"{FOLDER}/{address}", abs_src_path=str(path)))
    for address, content in generated_files(root).items():
        files.append(File.generated(config, f"{FOLDER}/{address}", content=content))
    return files


def copied_files(root: Path) -> dict[str, Path]:
    """What is copied from the repository: addresses below `playground/`, and the files."""
    found = {f"common/{name}": root / "common" / name for name in COMMON}
    for milestone in MILESTONES:
        for name in ORDER:
            path = root / milestone / name
            if path.is_file():
                found[f"policies/{milestone}/{name}"] = path
    return found


def vendored_files(root: Path) -> dict[str, Path]:
    """What was fetched, package by package; a package of which a file is missing is left out."""
    found = {}
    for package, names in FILES.items():
        if is_there(root, package):
            found |= {f"vendor/{package}/{name}": folder_of(root, package) / name for name in names}
    return found


def generated_files(root: Path) -> dict[str, str]:
    """What is made here: addresses below `playground/`, and the texts."""
    use_folder(root / "docs" / FOLDER, {name: root / name for name in MILESTONES})
    runs = {f"runs/{preset['id']}.json": json.dumps(recorded(preset)) for preset in presets(root)}
    return runs | {"manifest.json": json.dumps(manifest(root), indent=1)}


def python_files(root: Path) -> list[str]:
    """What the worker copies into Python's file system, by address."""
    simulator = root / "docs" / FOLDER / "simulator"
    own = [f"simulator/{path.name}" for path in sorted(simulator.glob("*.py"))]
    return [*own, "cost_model.json", *copied_files(root)]


def manifest(root: Path) -> dict[str, Any]:
    """What the page has to know before it loads anything."""
    vendored = vendored_files(root)
    packages = {}
    for package, version in VERSIONS.items():
        sizes = {
            address: path.stat().st_size
            for address, path in vendored.items()
            if address.startswith(f"vendor/{package}/")
        }
        packages[package] = {"version": version, "files": sizes} if sizes else None
    defaults = asdict(Settings())
    del defaults["milestone"]
    return {
        "milestones": MILESTONES,
        "python": python_files(root),
        "packages": packages,
        "defaults": defaults,
        "ranges": RANGES,
        "arrivals": ARRIVALS,
        "presets": presets(root),
    }


def presets(root: Path) -> list[dict[str, Any]]:
    """Those of the page, with each edit as the whole text of the function."""
    folder = root / "docs" / FOLDER
    if not (folder / "presets.json").is_file():
        return []
    return [
        {name: value for name, value in preset.items() if name != "edit"}
        | {"edits": dict(edited(root, preset["milestone"], preset.get("edit", {})))}
        for preset in json.loads((folder / "presets.json").read_text(encoding="utf-8"))
    ]


def edited(root: Path, milestone: str, edit: dict[str, list[list[str]]]) -> Iterator[tuple[str, str]]:
    """Each function's text with its pieces replaced (`replaced`)."""
    for name, pairs in edit.items():
        file, _, function = name.partition(":")
        source = (root / milestone / file).read_text(encoding="utf-8")
        original = function_of(source, function)
        assert original is not None, f"{milestone} has no {name}"
        yield name, replaced(original.text, pairs)


def recorded(preset: dict[str, Any]) -> dict[str, Any]:
    """A preset's run, as the worker would answer it, once `use_folder` has said where the files are."""
    settings = Settings.of(preset["settings"] | {"milestone": preset["milestone"]})
    return run_policy(preset["milestone"], settings, preset["edits"]).as_json()
