"""A made-up repository with two milestones, and a way to build a site from it with the real hooks and settings."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "hooks"))  # as mkdocs does when it loads a hook: they share a module

LEDGER = """
[tool.milestones.v0_1_first]
title = "v0.1: the first"
new = ["__init__.py", "llm.py", "gone.py"]

[tool.milestones.v0_2_second]
title = "v0.2: the second"
predecessor = "v0_1_first"
new = ["blocks.py", "web/index.html"]
changed = ["llm.py"]
same = ["__init__.py"]
dropped = ["gone.py"]
"""
LLM = '''"""Runs a model.

```
a fence inside the source
```
"""

LIMIT = 16


class LLM:
    """All of it."""

    def generate(self, prompt: str) -> str:
        return prompt
'''
THEME = ("overrides/main.html", "img/logo.svg", "img/favicon.svg")  # what the real mkdocs.yml asks for
CONFIG = """
INHERIT: {root}/mkdocs.yml
docs_dir: docs
site_dir: site
hooks: [{root}/docs/hooks/diffs.py, {root}/docs/hooks/excerpt.py, {root}/docs/hooks/includes.py]
extra_css: []
nav:
  - Home: index.md
  - Milestones: [milestones/v0_1.md, milestones/v0_2.md]
  - Changes: []
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The made-up repository: sources, ledger, and a site of three small pages."""
    files = {
        "pyproject.toml": LEDGER,
        "mkdocs.yml": CONFIG.format(root=ROOT),
        "common/errors.py": "class ModelError(ValueError):\n    pass\n",
        "v0_1_first/__init__.py": "",
        "v0_1_first/llm.py": LLM,
        "v0_1_first/gone.py": "x = 1\ny = 2\n",
        "v0_2_second/__init__.py": "",
        "v0_2_second/llm.py": LLM.replace("return prompt", "text = prompt.upper()\n        return text"),
        "v0_2_second/blocks.py": "BLOCK_SIZE = 16\n",
        "v0_2_second/web/index.html": "<p>Hello</p>\n",
        **{f"docs/{name}": (ROOT / "docs" / name).read_text(encoding="utf-8") for name in THEME},
        "docs/index.md": "# Home\n\n[the first](milestones/v0_1.md)\n",
        "docs/milestones/v0_1.md": "# v0.1\n\n--excerpt-- v0_1_first/llm.py LLM.generate\n",
        "docs/milestones/v0_2.md": "# v0.2\n\n## What changes\n\n[all](../changes/v0_2.md#llm-py)\n",
    }
    for path, text in files.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def build() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `mkdocs build --strict` on the `mkdocs.yml` of a folder; the caller looks at the return code."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")

    def run(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
        mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict"]
        command = [*mkdocs, "--config-file", str(folder / "mkdocs.yml"), "--site-dir", str(site)]
        environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1", "SITE_URL": ""}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)

    return run
