"""The notebooks run as plain scripts, their asserts hold, and the hook keeps of their pages what the site can show."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAYS = {
    "v0_1": ["logits: (36, 49152)", "46,080 bytes a token, 11.25 MiB reserved", "rows computed: 47 with the cache"],
    "v0_2": [
        "ValueError: request C needs more than the 2 free blocks",
        "table [9, 3]",
        "RequestError: The KV pool has",
    ],
    "v0_3": ["torch is loaded: False", "preemptions: [(6, ['B'])]", "budget 64: chunks of [61, 61, 59]"],
    "v0_4": ["text/event-stream", '"param": "temperature"', "0 blocks after you had left", "it has ended"],
    "v0_5": ["TPOT 10 ms,  ITL 10 ms", "mean end-to-end latency 500 ms", "134,479,872 elements of 4 bytes"],
    "v0_9": ["the same bits: True", "behind the first k:          [100.0, 101.0", "after 40 keys: largest"],
    "v0_8": ["(3/0: preemption)", "'free, findable': 11", "steps without blocks: {'0/0': 0, '1/0': 0,"],
    "v0_10": ["abcx   to A: prefix, 3 of 4", "threshold 8: requests at tick 80 [8, 8, 8, 0]", "'C': 0, 'D': 40}"],
}
ARITHMETIC = {  # cells whose times follow from numbers that stand in them
    "v0_5": [
        "one_by_one = RequestResult(end=0.5, chunk_times=[0.2 + 0.01 * i for i in range(31)], num_output_tokens=31)",
        'refused = RequestResult(end=0.001, error="HTTP 503: the queue is full")',
        "import matplotlib.pyplot as plt",
    ],
}


def test_every_notebook_is_run_here() -> None:
    scripts = {path.stem for path in (ROOT / "docs" / "notebooks").glob("*.py")}
    assert scripts >= SAYS.keys()
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [name for name in sorted(scripts) if f": notebooks/{name}.py" not in nav] == []


@pytest.mark.parametrize("name", SAYS)
def test_notebook_uses_public_names_only(name: str) -> None:
    tree = ast.parse((ROOT / "docs" / "notebooks" / f"{name}.py").read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert [name for name in sorted(used) if name.startswith("_") and not name.endswith("__")] == []


@pytest.mark.real_model
@pytest.mark.parametrize("name", SAYS)
def test_notebook_runs_as_a_script_and_its_asserts_hold(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    # One thread, as in conftest.py: threads that wait for each other take many times as long on a busy machine.
    environment = {**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    script = ROOT / "docs" / "notebooks" / f"{name}.py"
    result = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert [line for line in SAYS[name] if line not in result.stdout] == []


def page(*cells: str) -> str:
    """Cells as mkdocs-jupyter writes them, with the scripts and styles that it puts around them."""
    pytest.importorskip("bs4")
    return '<script src="https://cdn.invalid/require.js"></script><style>table {}</style>' + "".join(cells)


def text_cell(html: str) -> str:
    return f'<div class="jp-Notebook-cell" id="a"><div class="jp-RenderedMarkdown">{html}</div></div>'


def code_cell(*outputs: str, tags: str = "") -> str:
    code = '<div class="jp-InputArea"><div class="jp-InputPrompt">In [1]:</div><pre>x &lt; 1</pre></div>'
    return f'<div class="jp-Notebook-cell {tags}" id="b">{code}{"".join(outputs)}</div>'


def printed(text: str) -> str:
    return f'<div class="jp-RenderedText jp-OutputArea-output"><pre>{text}</pre></div>'


PLOT = '<div class="jp-RenderedImage jp-OutputArea-output"><img src="data:image/png;base64,AA"></div>'


def test_hook_keeps_text_code_prints_and_plots_and_nothing_else() -> None:
    from notebooks import tidy

    html = tidy(page(text_cell("<p>Text</p>"), code_cell(printed("1\n"), printed("2\n"), PLOT)), str, "")
    assert html.split("\n", 2)[:2] == [
        "<p>Text</p>",
        '<div class="language-python highlight"><pre><code>x &lt; 1</code></pre></div>',
    ]
    assert '<pre class="notebook-output">1\n2\n</pre>' in html
    assert 'src="data:image/png;base64,AA"' in html
    assert "script" not in html
    assert "style" not in html
    assert "In [1]" not in html


def test_hook_turns_links_to_source_files() -> None:
    from notebooks import tidy

    links = '<a href="../x.md#y">1</a><a href="#z">2</a><a href="https://e.invalid/">3</a>'
    html = tidy(page(text_cell(links)), lambda target: f"/turned/{target}", "")
    assert 'href="/turned/../x.md#y"' in html
    assert 'href="#z"' in html
    assert 'href="https://e.invalid/"' in html


def test_hook_says_below_a_timed_cell_where_it_ran_and_below_no_other() -> None:
    from notebooks import tidy

    cells = code_cell(printed("2 layers")), code_cell(printed("110 ms"), tags="jp-mod-x celltag_timed")
    html = tidy(page(*cells), str, "on 2 cores & busy")
    assert html.count("notebook-timed") == 1
    assert html.endswith('110 ms</pre>\n<p class="notebook-timed">on 2 cores &amp; busy</p>')


def test_hook_names_processor_cores_threads_and_load(monkeypatch: pytest.MonkeyPatch) -> None:
    import notebooks

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(notebooks, "machine", lambda: {"cpu": "Abacus avx2", "cores": 2})
    monkeypatch.setattr(notebooks.os, "getloadavg", lambda: (3.14, 0.0, 0.0), raising=False)
    text = notebooks.where_it_ran()
    assert text.startswith("Timed as this page was built, on Abacus avx2 with 2 cores, with a load of 3.1; ")
    assert "PyTorch had 1 thread. " in text


def cells_of(name: str) -> list[tuple[str, str]]:
    """The code cells of a notebook: what stands beside `# %%`, and the source."""
    text = (ROOT / "docs" / "notebooks" / f"{name}.py").read_text(encoding="utf-8")
    parts = re.split(r"^# %%(.*)\n", text, flags=re.MULTILINE)[1:]
    return [(mark, source) for mark, source in zip(parts[::2], parts[1::2], strict=True) if "[markdown]" not in mark]


@pytest.mark.parametrize("name", SAYS)
def test_every_cell_that_shows_a_measured_time_is_tagged(name: str) -> None:
    untagged = []
    for mark, source in cells_of(name):
        texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
        units = [
            text for text in texts if isinstance(text, str) and re.search(r"(^| )(ms|s|seconds|GB/s)(?![-\w])", text)
        ]
        if units and 'tags=["timed"]' not in mark:
            untagged.append(source.strip().partition("\n")[0])
    assert untagged == ARITHMETIC.get(name, [])


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([], "no cells"),
        ([code_cell('<div class="jp-RenderedHTMLCommon jp-OutputArea-output"><b>HTML</b></div>')], "neither text nor"),
        (['<div class="jp-Notebook-cell" id="c"></div>'], "neither text nor code"),
        ([code_cell(tags="celltag_timed")], "tagged `timed` and shows nothing"),
    ],
)
def test_hook_refuses_what_it_cannot_show(cells: list[str], message: str) -> None:
    from notebooks import NotebookError, tidy

    with pytest.raises(NotebookError, match=message):
        tidy(page(*cells), str, "")
