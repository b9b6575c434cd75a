"""A function's body in a file's text: found by the syntax tree, replaced by lines, so that nothing else changes a byte.

A body begins after the signature and the docstring, comments included. What is taken out leaves one line:

    raise NotImplementedError("Task 1: BlockManager.allocate. Stuck? python -m tools.lab hint")

(A generator of a coroutine keeps a `yield` behind it: without one, Python would make another kind of function of it.)
"""

import ast
import textwrap
from collections.abc import Iterator

from tools.lab.tasks import LabError

Definition = ast.FunctionDef | ast.AsyncFunctionDef


def parse(source: str, where: str) -> ast.Module:
    """The tree of a file's text; `where` is its path, for the error.

    Raises:
        LabError: it is no Python, with the line and the column.
    """
    try:
        return ast.parse(source)
    except SyntaxError as error:
        line = (source.split("\n")[error.lineno - 1 : error.lineno] or [""])[0] if error.lineno else ""
        raise LabError(
            f"{where} is not valid Python yet: {error.msg}, line {error.lineno}, column {error.offset}.\n"
            f"    {line.strip()}\nMend this line, then try again."
        ) from None


def find(source: str, name: str, where: str) -> Definition:
    """The function of this dotted name.

    Raises:
        LabError: it is not there.
    """
    body: list[ast.stmt] = parse(source, where).body
    node: ast.stmt | None = None
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        node = next((child for child in body if isinstance(child, kinds) and child.name == part), None)
        if node is None:
            raise LabError(
                f"{where} has no {name} any more: put its `def` line back, or start over with "
                "`start MILESTONE --again` (what is there is put aside)."
            )
        body = getattr(node, "body", [])
    if not isinstance(node, Definition):
        raise LabError(f"{where}: {name} is no function.")
    return node


def line_of(source: str, name: str, where: str) -> int:
    """The line where a function's body begins, counted from 1."""
    return _span(find(source, name, where))[0]


def body(source: str, name: str, where: str) -> str:
    """The lines of a function's body, as they are."""
    first, last = _span(find(source, name, where))
    return "\n".join(source.split("\n")[first - 1 : last])


def with_body(source: str, name: str, new_body: str, where: str) -> str:
    """The file's text with another body in a function."""
    first, last = _span(find(source, name, where))
    lines = source.split("\n")
    return "\n".join([*lines[: first - 1], new_body, *lines[last:]])


def without_body(source: str, name: str, message: str, where: str) -> str:
    """The file's text with nothing but an error in a function."""
    node = find(source, name, where)
    indent = " " * node.body[0].col_offset
    stub = f'{indent}raise NotImplementedError("{message}")'
    if isinstance(node, ast.AsyncFunctionDef) and any(isinstance(child, ast.Yield) for child in _own(node)):
        stub += f"\n{indent}yield  # keeps this a generator: yours will have a yield, too"
    return with_body(source, name, stub, where)


def is_missing(source: str, name: str, where: str) -> bool:
    """Whether nobody has written a function yet."""
    statements = _statements(find(source, name, where))
    return bool(statements) and "NotImplementedError" in ast.unparse(statements[0]).partition("\n")[0]


def planted(source: str, name: str, old: str, new: str, where: str) -> str:
    """The file's text with one expression or statement of a function replaced: the one whose tree is that of `old`.

    Raises:
        LabError: it is not there exactly once.
    """
    wanted: ast.AST = ast.parse(old).body[0]
    if isinstance(wanted, ast.Expr):
        wanted = wanted.value
    same = [
        node
        for node in ast.walk(find(source, name, where))
        if isinstance(node, type(wanted)) and ast.unparse(node) == ast.unparse(wanted)
    ]
    if len(same) != 1:
        raise LabError(f"{where}: {old!r} is in {name} {len(same)} times, but a fault is planted in one place.")
    node = same[0]
    assert isinstance(node, ast.expr | ast.stmt)
    assert node.end_lineno is not None
    lines = source.split("\n")
    # Columns count bytes.
    before = lines[node.lineno - 1].encode()[: node.col_offset].decode()
    after = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
    text = textwrap.indent(new, " " * node.col_offset).lstrip() if isinstance(node, ast.stmt) else new
    return "\n".join([*lines[: node.lineno - 1], before + text + after, *lines[node.end_lineno :]])


def _statements(node: Definition) -> list[ast.stmt]:
    """A function's statements behind its docstring."""
    return node.body if ast.get_docstring(node, clean=False) is None else node.body[1:]


def _span(node: Definition) -> tuple[int, int]:
    """First and last line of a function's body, counted from 1."""
    assert node.end_lineno is not None
    if _statements(node) is node.body:
        header = node.returns or node
        first = (header.end_lineno if node.returns else node.body[0].lineno - 1) or 0
    else:
        first = node.body[0].end_lineno or 0
    return first + 1, node.end_lineno


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _own(child)
