"""A made-up repository of four milestones, whose ledger holds."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

MILESTONES = ("v0_1_first", "v0_2_second", "v0_3_third", "v0_4_fourth")
LEDGER = """
[tool.milestones.v0_1_first]
title = "first"
new = ["llm.py", "cache.py", "only_first.py", "web/index.html"]

[tool.milestones.v0_2_second]
title = "second"
predecessor = "v0_1_first"
new = ["blocks.py"]
changed = ["cache.py"]
same = ["llm.py", "web/index.html"]
dropped = ["only_first.py"]

[tool.milestones.v0_3_third]
title = "third"
predecessor = "v0_2_second"
new = ["only_first.py"]
changed = ["blocks.py"]
same = ["llm.py", "cache.py", "web/index.html"]

[tool.milestones.v0_4_fourth]
title = "fourth"
predecessor = "v0_3_third"
same = ["llm.py", "blocks.py", "only_first.py"]
changed = ["cache.py", "web/index.html"]
"""
CACHE = "".join(f"line {number}\n" for number in range(1, 13))
CACHE_2 = CACHE.replace("line 12\n", "the lesson of v0.2\n")
CACHE_4 = CACHE_2.replace("line 6\n", "the lesson of v0.4\n")
FILES = {
    "pyproject.toml": LEDGER,
    **{f"{name}/llm.py": "class LLM: ...\n" for name in MILESTONES},
    "v0_1_first/cache.py": CACHE,
    "v0_2_second/cache.py": CACHE_2,
    "v0_3_third/cache.py": CACHE_2,
    "v0_4_fourth/cache.py": CACHE_4,
    "v0_1_first/only_first.py": "an experiment\n",
    "v0_3_third/only_first.py": "another experiment\n",
    "v0_4_fourth/only_first.py": "another experiment\n",
    "v0_2_second/blocks.py": "blocks\n",
    "v0_3_third/blocks.py": "more blocks\n",
    "v0_4_fourth/blocks.py": "more blocks\n",
    **{f"{name}/web/index.html": "<p>page</p>\n" for name in MILESTONES[:3]},
    "v0_4_fourth/web/index.html": "<p>page</p>\n<p>more</p>\n",
    # and what does not count
    "v0_2_second/results/run.json": "{}\n",
    "v0_2_second/__pycache__/llm.py": "",
    "v0_9_left_over/__pycache__/llm.py": "",
}


@dataclass(frozen=True)
class Tree:
    """The repository, and what the tests do to it."""

    root: Path

    def read(self, path: str) -> str:
        return (self.root / path).read_text()

    def write(self, path: str, content: str = "other\n") -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(content)

    def edit(self, path: str, old: str, new: str) -> None:
        content = self.read(path)
        assert content.count(old) == 1
        self.write(path, content.replace(old, new))

    def edit_ledger(self, old: str, new: str) -> None:
        self.edit("pyproject.toml", old, new)

    def remove(self, path: str) -> None:
        (self.root / path).unlink()

    def snapshot(self) -> dict[str, str]:
        """Every file of the milestones with its content."""
        return {str(file.relative_to(self.root)): file.read_text() for file in self.root.glob("v0_*/**/*.*")}

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "state")

    def git(self, *arguments: str) -> None:
        identity = ("-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *arguments], cwd=self.root, check=True, capture_output=True)


@pytest.fixture(scope="session")
def pristine_tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """The repository, committed: made once, and copied for every test."""
    tree = Tree(tmp_path_factory.mktemp("pristine"))
    for path, content in FILES.items():
        tree.write(path, content)
    tree.git("init", "--quiet", "--template=")
    tree.commit()
    return tree


@pytest.fixture
def tree(pristine_tree: Tree, tmp_path: Path) -> Tree:
    """A repository of one's own, committed."""
    return Tree(Path(shutil.copytree(pristine_tree.root, tmp_path / "tree")))


@pytest.fixture(scope="session", autouse=True)
def no_outer_git() -> Iterator[None]:
    """A git hook that runs the tests would turn every git here to its own repository by these variables."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in [name for name in os.environ if name.startswith("GIT_")]:
            patch.delenv(variable)
        yield
