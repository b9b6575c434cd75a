"""Fetches what the playground loads beside our own files: Pyodide (CPython as WebAssembly), CodeMirror (an editor).

    python -m tools.playground_assets       into build/playground/, once; `make docs` does it

`npm pack` fetches the packages' archives, at exact versions, from whatever registry npm is set up for. An archive whose
SHA-512 is not the one that is written here is refused. Only the files that the page loads are kept; none is committed.
Without npm, or without a network, it says so and returns 0: the site builds as well, and the page shows recorded runs.
"""

import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = {"pyodide": "314.0.7", "codemirror": "5.65.21"}
INTEGRITY = {  # as npm's registry has it (`npm view pyodide@314.0.7 dist.integrity`)
    "pyodide": "sha512-0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A==",
    "codemirror": "sha512-6teYk0bA0nR3QP0ihGMoxuKzpl5W80FpnHpBJpgy66NK3cZv5b/d/HY8PnRvfSsCG1MTfr92u2WUl+wT0E40mQ==",
}
FILES = {
    "pyodide": ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json"),
    "codemirror": (
        "LICENSE",
        "lib/codemirror.js",
        "lib/codemirror.css",
        "mode/python/python.js",
        "addon/edit/matchbrackets.js",
        "addon/selection/active-line.js",
    ),
}


class AssetError(Exception):
    """An archive is not what it should be."""


def folder_of(root: Path, package: str) -> Path:
    """Where a package's files lie; another version has another folder."""
    return root / "build" / "playground" / f"{package}-{VERSIONS[package]}"


def is_there(root: Path, package: str) -> bool:
    """Whether all of its files have been fetched."""
    return all((folder_of(root, package) / name).is_file() for name in FILES[package])


def main() -> int:
    """The command line; 1 only for an archive that is not the expected one."""
    missing = [package for package in VERSIONS if not is_there(ROOT, package)]
    if not missing:
        return 0
    npm = shutil.which("npm")
    if npm is None:
        _say("The playground's page will show recorded runs only: npm, which fetches Pyodide, is not installed.")
        return 0
    for package in missing:
        _say(f"Fetching {package} {VERSIONS[package]} with npm (once) ...")
        try:
            with tempfile.TemporaryDirectory() as folder:
                archive = fetch(npm, package, Path(folder))
                unpack(archive, package, folder_of(ROOT, package))
        except subprocess.CalledProcessError as error:
            _say(f"npm could not fetch it. The playground's page will show recorded runs only.\n{error.stderr.strip()}")
            return 0
        except AssetError as error:
            _say(str(error))
            return 1
        _say(f"{package} {VERSIONS[package]} is what it should be (SHA-512).")
    return 0


def fetch(npm: str, package: str, folder: Path) -> Path:
    """The archive of a package."""
    command = [
        npm,
        "pack",
        f"{package}@{VERSIONS[package]}",
        "--silent",
        "--ignore-scripts",
        f"--pack-destination={folder}",
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return next(folder.glob("*.tgz"))


def unpack(archive: Path, package: str, target: Path) -> None:
    """Check an archive, and keep the files that the page loads.

    Raises:
        AssetError: it is another one, or a file is not in it. Nothing is kept then.
    """
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if f"sha512-{digest}" != INTEGRITY[package]:
        raise AssetError(
            f"{archive.name} is not the archive that tools/playground_assets.py names: its SHA-512 is {digest}."
        )
    with tarfile.open(archive) as tar:
        found = {}
        for name in FILES[package]:
            try:
                file = tar.extractfile(f"package/{name}")
            except KeyError:
                file = None
            if file is None:
                raise AssetError(f"{archive.name} has no file {name}.")
            found[name] = file.read()
    shutil.rmtree(target, ignore_errors=True)
    for name, content in found.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
