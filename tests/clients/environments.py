"""An environment for each client, made on demand and kept: `VENVS/NAME`, with pip or npm."""

import json
import re
import subprocess
import sys
import venv
from pathlib import Path

from .clients import Client

MADE = "requirements.json"  # in a whole environment: what it was made from
SECONDS_TO_INSTALL = 1200


class CannotInstall(Exception):  # noqa: N818
    """A client that this machine cannot get, and why."""


def environment(client: Client, venvs: Path) -> Path:
    """The folder of the client's environment, which is made unless it is there.

    Raises:
        CannotInstall: with what pip or npm said last.
    """
    folder = (venvs / client.name).absolute()
    made = folder / MADE
    if made.exists() and json.loads(made.read_text()) == list(client.requirements):
        return folder
    print(f"installing {client.title} ...", file=sys.stderr, flush=True)
    if client.is_npm:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true}')
        command = ["npm", "install", "--no-audit", "--no-fund", *client.requirements]
    else:
        venv.create(folder, with_pip=True, symlinks=True)
        command = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *client.requirements]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=SECONDS_TO_INSTALL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotInstall(str(error).splitlines()[0]) from None
    if done.returncode:
        raise CannotInstall((done.stderr.strip().splitlines() or ["no reason given"])[-1])
    made.write_text(json.dumps(client.requirements))
    return folder


def command(client: Client, folder: Path) -> list[str]:
    """What runs the client's scenario, but for its argument."""
    scenario = Path(__file__).parent / "scenarios" / f"try_{client.name}"
    if client.is_npm:
        return ["node", str(scenario.with_suffix(".mjs"))]
    return [str(folder / "bin" / "python"), str(scenario.with_suffix(".py"))]


def version(client: Client, folder: Path) -> str:
    """The version of the client that is installed there."""
    name = re.split(r"[\[<>=]", client.requirements[0])[0] if client.requirements else "vllm"
    if client.is_npm:
        return str(json.loads((folder / "node_modules" / name / "package.json").read_text())["version"])
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    done = subprocess.run([str(folder / "bin" / "python"), "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()
