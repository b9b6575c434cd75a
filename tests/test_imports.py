"""The import rules hold in this repository, and the rules' own tests: each one notices a made-up breach."""

from pathlib import Path

import grimp
import pytest

from tools.import_rules import (
    HEAVY,
    POLICY_MODULES,
    TORCH_FREE_COMMON,
    absolute_self_imports,
    build_graph,
    circular_imports,
    crossing_imports,
    forbidden_imports,
    import_statements,
    loaded,
    modules_of,
    policy_modules,
    upward_imports,
)
from tools.milestones import load_ledger

ROOT = Path(__file__).parents[1]
MILESTONES = [milestone.name for milestone in load_ledger(ROOT)]
PACKAGES = ["common", *MILESTONES, "tools"]
POLICY = {"common": TORCH_FREE_COMMON} | dict.fromkeys(MILESTONES, POLICY_MODULES)
VLLM = "vllm"  # apart from the word `import`: this file is searched, too


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return build_graph(PACKAGES)


def test_milestones_import_only_common_and_themselves(graph: grimp.ImportGraph) -> None:
    assert crossing_imports(graph, "common", MILESTONES, "tools") == []


def test_nothing_imports_vllm(graph: grimp.ImportGraph) -> None:
    internal = {module for package in PACKAGES for module in modules_of(graph, package)}
    assert forbidden_imports(graph, internal, {VLLM}) == []
    assert import_statements(ROOT, [*PACKAGES, "tests"], VLLM) == []


def test_no_two_tools_import_each_other(graph: grimp.ImportGraph) -> None:
    assert circular_imports(graph, "tools") == []


@pytest.mark.parametrize("milestone", MILESTONES)
def test_a_milestone_imports_itself_relatively(milestone: str) -> None:
    assert absolute_self_imports(ROOT, milestone) == []


@pytest.mark.parametrize("milestone", MILESTONES)
def test_the_engine_knows_no_server_and_no_harness_and_no_room_imports_from_one_above(
    milestone: str, graph: grimp.ImportGraph
) -> None:
    assert upward_imports(graph, milestone) == []


def test_no_policy_module_is_lost() -> None:
    """One that is renamed or moved would not be looked at any more, and the rules below would hold for nothing."""
    found = {module.partition(".")[2] for name in POLICY for module in policy_modules(ROOT, name, POLICY[name])}
    assert found == {*TORCH_FREE_COMMON, *POLICY_MODULES}


@pytest.mark.parametrize("package", POLICY)
def test_policy_names_no_torch(package: str, graph: grimp.ImportGraph) -> None:
    assert forbidden_imports(graph, policy_modules(ROOT, package, POLICY[package]), HEAVY) == []


@pytest.mark.parametrize("package", POLICY)
def test_policy_and_the_package_itself_load_no_torch(package: str) -> None:
    assert loaded(ROOT, [package, *policy_modules(ROOT, package, POLICY[package])]) == []


# The rules' own tests, on a repository that breaks them all. Its names are not the real ones: those are imported here.

BROKEN = {
    "made_common/__init__.py": "import made_tools\n",
    "made_common/errors.py": "def late():\n    import made_one.engine\n",
    "made_common/weights.py": "import torch.nn\n",
    "made_common/chat.py": "from made_tools import helper\n",
    "made_tools/__init__.py": "",
    "made_tools/helper.py": "import made_one\n",
    "made_tools/ledger.py": "from made_tools import helper\nfrom made_tools.carry import carry\n",
    "made_tools/carry.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made_tools import ledger\n",
    "made_one/__init__.py": "",
    "made_one/engine.py": "from made_common import weights\n",
    "made_one/request.py": f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {VLLM}.outputs\n",
    "made_one/scheduler.py": "def late():\n    from transformers import AutoTokenizer\n",
    "made_one/server.py": f"# from {VLLM}.outputs import RequestOutput\nnote = 'numbers from {VLLM} serve'\n",
    "made_two/__init__.py": "from .llm import LLM\n",
    "made_two/llm.py": "import made_one\nimport made_tools\nimport torch\nLLM = torch\n",
    "made_two/engine.py": "import made_two.llm\nfrom made_two import llm\nfrom . import request\n",
    "made_two/request.py": "",
    "made_three/__init__.py": "",
    "made_three/__main__.py": "from .upper.hall import cli\n",
    "made_three/engine.py": "def late():\n    from .lower import app\n",
    "made_three/lower/__init__.py": "",
    "made_three/lower/app.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..upper import hall\n",
    "made_three/lower/__main__.py": "from ..upper import hall\nfrom . import app\n",
    "made_three/lowering.py": "",
    "made_three/upper/__init__.py": "from .. import engine\n",
    "made_three/upper/hall.py": "from . import room\nfrom .. import lowering\nfrom ..lower import app\n",
    "made_three/upper/room.py": "from ..upper import hall\n",
    "made_two/web/app.py": "def late():\n    import made_two\n",
    "torch/__init__.py": "",
    "torch/nn.py": "",
}


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path, content in BROKEN.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def broken_graph(broken: Path) -> grimp.ImportGraph:
    return build_graph(["made_common", "made_one", "made_two", "made_three", "made_tools"])


def test_crossing_imports_are_found(broken_graph: grimp.ImportGraph) -> None:
    assert crossing_imports(broken_graph, "made_common", ["made_one", "made_two"], "made_tools") == [
        "made_common imports made_tools",
        "made_common.chat imports made_tools.helper",
        "made_common.errors imports made_one.engine",
        "made_two.llm imports made_one",
        "made_two.llm imports made_tools",
    ]


def test_forbidden_imports_are_found(broken_graph: grimp.ImportGraph) -> None:
    assert forbidden_imports(broken_graph, modules_of(broken_graph, "made_one"), {VLLM}) == [
        f"made_one.request imports {VLLM}"
    ]
    policy = ["made_one.scheduler", "made_one.request", "made_one.engine"]
    assert forbidden_imports(broken_graph, policy, HEAVY) == ["made_one.scheduler imports transformers"]


def test_imports_of_an_upper_floor_are_found_and_a_main_may_make_them(broken_graph: grimp.ImportGraph) -> None:
    assert upward_imports(broken_graph, "made_three", ["", "lower", "upper", "upper.hall"]) == [
        "made_three.engine imports made_three.lower.app, which stands above it",
        "made_three.lower.app imports made_three.upper.hall, which stands above it",
        "made_three.upper.room imports made_three.upper.hall, which stands above it",
    ]


def test_circular_imports_are_found(broken_graph: grimp.ImportGraph) -> None:
    assert circular_imports(broken_graph, "made_tools") == [
        "made_tools.carry imports made_tools.ledger, which leads back to it",
        "made_tools.ledger imports made_tools.carry, which leads back to it",
    ]
    assert circular_imports(broken_graph, "made_common") == []


def test_absolute_self_imports_are_found(broken: Path) -> None:
    assert absolute_self_imports(broken, "made_one") == []
    assert absolute_self_imports(broken, "made_two") == [
        "made_two/engine.py:1 imports made_two.llm: make it relative",
        "made_two/engine.py:2 imports made_two: make it relative",
        "made_two/web/app.py:2 imports made_two: make it relative",
    ]


def test_mentioned_imports_are_found(broken: Path) -> None:
    assert import_statements(broken, ["made_one", "made_two"], VLLM) == [
        f"made_one/request.py:3 mentions an import of {VLLM}",
        f"made_one/server.py:1 mentions an import of {VLLM}",
    ]


def test_policy_modules_are_those_that_exist(broken: Path) -> None:
    names = ("request", "scheduler", "engine", "web.app", "web.request")
    assert policy_modules(broken, "made_two", names) == ["made_two.request", "made_two.engine", "made_two.web.app"]


def test_what_is_loaded_by_a_policy_or_a_package_is_found(broken: Path) -> None:
    assert loaded(broken, ["made_one", "made_one.request", "made_one.scheduler"]) == []  # nothing when it is imported
    assert loaded(broken, ["made_one", "made_one.engine"]) == ["importing made_one.engine loads torch"]
    assert loaded(broken, ["made_two", "made_two.request"]) == ["importing made_two loads torch"]
