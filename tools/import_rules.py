"""The import rules, as functions that return one line per breach. tests/test_imports.py applies them to the repository.

A milestone imports `common` and itself, and itself only relatively: that is what lets a file go on, byte for byte, into
the next milestone. Policy imports no torch: that is what lets it be tested without a model. vLLM is compared with over
HTTP, in an environment of its own, and is never imported.

Whatever is read here is read as source (grimp, `ast`), so imports inside functions and under `TYPE_CHECKING` count.
`loaded` alone runs the code, to see what really gets imported.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import grimp

HEAVY = ("torch", "transformers")  # seconds to import, and no business of a policy
POLICY_MODULES = (  # in a milestone, where it has them; one in a folder as "server.protocol"
    "block_manager",
    "request",
    "scheduler",
    "engine",
    "engine_args",
    "async_engine",
    "server.server_args",
    "server.protocol",
    "server.metrics",
    "cluster.cluster_args",
    "cluster.expositions",
    "cluster.keys",
    "cluster.routing",
    "harness.load.workloads",
    "harness.load.summary",
    "harness.load.runs",
    "harness.compare.peers",
    "harness.report.tables",
)
FLOORS = (  # of a milestone, from the ground up: each imports from its own floor and from those below
    "",  # the engine: whatever stands in no wing
    "server",
    "cluster",
    "harness",  # the names that its rooms share
    "harness.load",
    "harness.compare",
    "harness.report",
    "harness.explain",
    "harness.gpu",
    "harness.cli",
)
TORCH_FREE_COMMON = (
    "errors",
    "sampling_params",
    "outputs",
    "prompts",
    "chat",
    "cli",
    "units",
    "architecture",
    "token_length",
    "measuring.recipe",
    "measuring.child",
    "gguf.config",
    "gguf.file",
    "gguf.tokenizer",
    "gguf.types",
)

# Runs in an interpreter of its own; argv: the heavy modules, then the modules to import, both as JSON.
_LOAD = """
import importlib, json, sys
heavy, modules = map(json.loads, sys.argv[1:])
faults = []
for module in modules:
    importlib.import_module(module)
    loaded = [name for name in heavy if name in sys.modules]
    faults += [f"importing {module} loads {name}" for name in loaded]
    heavy = [name for name in heavy if name not in loaded]  # it stays loaded: only the first import is to blame
print(json.dumps(faults))
"""


def build_graph(packages: Sequence[str]) -> grimp.ImportGraph:
    """Who imports whom in these packages, which have to be importable; external packages are in it by their name."""
    return grimp.build_graph(*packages, include_external_packages=True, cache_dir=None)


def forbidden_imports(graph: grimp.ImportGraph, importers: Iterable[str], forbidden: Iterable[str]) -> list[str]:
    """Direct imports of a package in `forbidden` (or of anything in it) by a module in `importers`."""
    forbidden = set(forbidden)
    return [
        f"{importer} imports {imported}"
        for importer in sorted(importers)
        for imported in sorted(graph.find_modules_directly_imported_by(importer))
        if imported.split(".")[0] in forbidden
    ]


def modules_of(graph: grimp.ImportGraph, package: str) -> set[str]:
    """The package itself and all modules in it."""
    return {package} | graph.find_descendants(package)


def crossing_imports(graph: grimp.ImportGraph, common: str, milestones: Sequence[str], tools: str) -> list[str]:
    """A milestone imports no other and no tools; `common` imports none of them at all."""
    faults = forbidden_imports(graph, modules_of(graph, common), {*milestones, tools})
    for milestone in milestones:
        faults += forbidden_imports(graph, modules_of(graph, milestone), {*milestones, tools} - {milestone})
    return faults


def upward_imports(graph: grimp.ImportGraph, milestone: str, floors: Sequence[str] = FLOORS) -> list[str]:
    """Imports of a floor by one below it. A `__main__` stands on none: it is where they are put together."""
    faults = []
    for importer in sorted(modules_of(graph, milestone)):
        if importer.endswith(".__main__"):
            continue
        for imported in sorted(graph.find_modules_directly_imported_by(importer)):
            here, there = _floor(importer, milestone, floors), _floor(imported, milestone, floors)
            if there is not None and here is not None and there > here:
                faults.append(f"{importer} imports {imported}, which stands above it")
    return faults


def _floor(module: str, milestone: str, floors: Sequence[str]) -> int | None:
    """On which floor of the milestone this module stands; `None` if it is none of its modules."""
    if f"{module}.".startswith(f"{milestone}."):
        inside = module.removeprefix(milestone).removeprefix(".")
        return max(i for i, floor in enumerate(floors) if not floor or f"{inside}.".startswith(f"{floor}."))
    return None


def circular_imports(graph: grimp.ImportGraph, package: str) -> list[str]:
    """Direct imports inside the package from which other imports lead back."""
    modules = modules_of(graph, package)
    return [
        f"{importer} imports {imported}, which leads back to it"
        for importer in sorted(modules)
        for imported in sorted(graph.find_modules_directly_imported_by(importer) & modules)
        if graph.chain_exists(importer=imported, imported=importer)
    ]


def policy_modules(root: Path, package: str, names: Sequence[str]) -> list[str]:
    """Those of the package's modules `names` that it has, as full names. A dot in a name leads into a folder."""
    return [f"{package}.{name}" for name in names if (root / package / f"{name.replace('.', '/')}.py").is_file()]


def absolute_self_imports(root: Path, package: str) -> list[str]:
    """Imports of `package` inside itself that are not relative."""
    faults = []
    for file in sorted((root / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
                imported = [node.module]
            else:
                continue
            faults += [
                f"{file.relative_to(root)}:{node.lineno} imports {name}: make it relative"
                for name in imported
                if name.split(".")[0] == package
            ]
    return faults


def import_statements(root: Path, folders: Sequence[str], package: str) -> list[str]:
    """Lines of Python in `folders` that mention an import of `package`, be it in a string or a comment."""
    statement = re.compile(rf"\bimport\s+{package}\b|\bfrom\s+{package}\b[\w.]*\s+import\b")
    return [
        f"{file.relative_to(root)}:{number} mentions an import of {package}"
        for folder in folders
        for file in sorted((root / folder).rglob("*.py"))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if statement.search(line)
    ]


def loaded(root: Path, modules: Sequence[str], heavy: Sequence[str] = HEAVY) -> list[str]:
    """Import `modules` one after the other in a fresh interpreter, and say which of them loads a `heavy` one.

    Raises:
        subprocess.CalledProcessError: a module cannot be imported; its traceback is on stderr.
    """
    command = [sys.executable, "-c", _LOAD, json.dumps(list(heavy)), json.dumps(list(modules))]
    # With -c the folder that it is run in is the first place for imports.
    result = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=True)
    faults: list[str] = json.loads(result.stdout)
    return faults
