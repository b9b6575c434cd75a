"""The two gates over a built site, on pages made up for them."""

from pathlib import Path

import pytest

from tools import sitecheck


def problems(site: Path, body: str = "", *, base: str = "/", **files: str) -> list[str]:
    """What `check` says of a site with a home page, a page `a/` with `body`, and other files (`__` is a slash)."""
    pages = {
        "index.html": '<h1 id="top-of-all">Home</h1><a name="old">x</a>',
        "a/index.html": f'<html><body id="body">{body}</body></html>',
        "404.html": '<a href="/a/">a</a>' if base == "/" else f'<a href="{base}a/">a</a>',
        **{name.replace("__", "/").replace("_DOT_", "."): text for name, text in files.items()},
    }
    for path, text in pages.items():
        file = site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return sitecheck.check(site, base)


@pytest.mark.parametrize(
    "body",
    [
        '<script src="https://cdn.example/x.js"></script>',
        '<script src="//cdn.example/x.js"></script>',
        '<link rel="stylesheet" href="https://fonts.example/css">',
        '<link rel="shortcut icon" href="http://x.example/i.png">',
        '<link rel="preconnect" href="https://fonts.example">',
        '<img src="https://img.shields.example/badge.svg">',
        '<img srcset="../ok.png 1x, https://x.example/b.png 2x">',
        '<iframe src="https://x.example/"></iframe>',
        '<video poster="https://x.example/p.png"></video>',
        '<svg><use xlink:href="https://x.example/i.svg#a"/></svg>',
        '<svg><rect fill="url(https://x.example/i.svg#a)"/></svg>',
        '<div style="background: url(//x.example/b.png)"></div>',
        "<style>@import 'https://fonts.example/css';</style>",
        '<style>@font-face { src: url( "https://fonts.example/f.woff2" ) }</style>',
        "<script>import('https://cdn.example/x.mjs')</script>",
        '<script type="module">import x from "//cdn.example/x.mjs"</script>',
    ],
)
def test_load_from_another_host_is_found(tmp_path: Path, body: str) -> None:
    found = problems(tmp_path, body, ok_DOT_png="")
    assert len(found) == 1
    assert found[0].startswith("a/index.html: ")
    assert "load" in found[0]


@pytest.mark.parametrize(
    "body",
    [
        '<a href="https://docs.vllm.example/">a link is no load</a>',
        '<link rel="canonical" href="https://me.example/a/">',
        '<img src="data:image/png;base64,AAAA">',
        "<style>a { background: url(data:image/svg+xml;charset=utf-8,%3Csvg/%3E) }</style>",
        "<style>/* url(https://x.example) */</style>",
        "<script>var a = 1; // see https://x.example/</script>",
        '<pre>&lt;script src="https://cdn.example/x.js"&gt;</pre>',
        '<script>f("https://unpkg.com/mermaid@11/dist/mermaid.min.js")</script>',
        '<a href="mailto:me@x.example">me</a><a href="javascript:void(0)">x</a>',
    ],
)
def test_what_loads_nothing_is_left_alone(tmp_path: Path, body: str) -> None:
    assert problems(tmp_path, body) == []


def test_style_sheets_scripts_and_drawings_are_read_too(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        css__x_DOT_css="@import url(https://fonts.example/css); b { background: url(../lost.png) }",
        x_DOT_js='fetch("https://x.example/data.json")',
        x_DOT_svg='<svg><image href="https://x.example/a.png"/></svg>',
    )
    assert found == [
        "css/x.css: loads https://fonts.example/css",
        "x.js: a script may load https://x.example/data.json",
        "x.svg: loads https://x.example/a.png",
        "css/x.css: ../lost.png is dead: there is no lost.png",
    ]


@pytest.mark.parametrize("name", ["mermaid", "md-source"])
def test_element_that_makes_the_theme_ask_another_host_is_found(tmp_path: Path, name: str) -> None:
    assert len(problems(tmp_path, f'<pre class="x {name}"></pre>')) == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('<a href="../lost/">x</a>', "there is no lost"),
        ('<a href="../index.html#lost">x</a>', "index.html has no anchor lost"),
        ('<a href="#lost">x</a>', "a/index.html has no anchor lost"),
        ('<img src="lost.png">', "there is no a/lost.png"),
        ('<script src="../lost.js"></script>', "there is no lost.js"),
        ('<link rel="stylesheet" href="lost.css">', "there is no a/lost.css"),
        ('<a href="../../index.html">x</a>', "leaves the site"),
        ('<svg><path marker-end="url(#lost)"/></svg>', "has no anchor lost"),
        ('<a href="../empty/">x</a>', "there is no empty/index.html"),
    ],
)
def test_dead_local_link_is_found(tmp_path: Path, body: str, reason: str) -> None:
    found = problems(tmp_path, body, empty__x_DOT_txt="")
    assert len(found) == 1
    assert reason in found[0]


@pytest.mark.parametrize(
    "body",
    [
        '<a href="..">x</a><a href="../">x</a><a href=".">x</a><a href="">x</a><a href="/">x</a>',
        '<a href="../#top-of-all">x</a><a href="/index.html#old">x</a><a href="#body">x</a><a href="#">x</a>',
        '<h2 id="中文">x</h2><a href="#%E4%B8%AD%E6%96%87">x</a><a href="#中文">x</a>',
        '<a href="../a%20b.txt?x=1">x</a><img src="../a b.txt#only-light">',
        '<svg><marker id="m"/><path marker-end="url(#m)"/></svg>',
    ],
)
def test_live_local_link_is_left_alone(tmp_path: Path, body: str) -> None:
    assert problems(tmp_path, body, **{"a b_DOT_txt": ""}) == []


def test_base_is_the_path_of_the_published_site(tmp_path: Path) -> None:
    body = '<a href="/mini-vllm/">right</a><a href="/a/">wrong</a>'
    assert problems(tmp_path, body, base="/mini-vllm/") == ["a/index.html: /a/ leaves the site"]


def test_empty_site_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sitecheck.main([str(tmp_path)]) == 1
    assert "holds no index.html" in capsys.readouterr().out


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert problems(tmp_path, '<a href="../lost/">x</a>')
    assert sitecheck.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == "a/index.html: ../lost/ is dead: there is no lost/\n"
    assert problems(tmp_path) == []
    assert sitecheck.main([str(tmp_path), "--base", "/"]) == 0


def test_page_that_is_too_large_is_found(tmp_path: Path) -> None:
    [found] = problems(tmp_path, "x" * 350_001)
    assert found.startswith("a/index.html: 350,0")
    assert found.endswith("bytes, more than 350,000: split it, or show less")


@pytest.mark.parametrize(("page", "columns"), [("a", 336), ("changes", 140)])
def test_line_of_code_that_is_cut_off_is_found(tmp_path: Path, page: str, columns: int) -> None:
    def body(length: int) -> str:
        return f"<pre><code>short\n<span>{'x' * (length - 3)}</span>&lt;&gt;\t\nshort</code></pre><p>{'x' * 999}</p>"

    assert problems(tmp_path, **{f"{page}__b__index_DOT_html": body(columns)}) == []
    assert problems(tmp_path, **{f"{page}__b__index_DOT_html": body(columns + 1)}) == [
        f"{page}/b/index.html: a line of code has {columns + 1} characters, and {columns} are shown: {'x' * 60}"
    ]


@pytest.mark.parametrize(
    ("shape", "is_white"),
    [
        ('<rect width="100%" height="100%" fill="#fff"/>', True),
        ('<rect width="700" height="300" style="fill: #FFFFFF"/>', True),
        ('<path d="M 0 300 L 720 300 L 720 0 L 0 0 z" style="fill: white"/>', True),
        ('<rect width="600" height="300" fill="#fff"/>', False),
        ('<rect width="100%" height="100%" fill="#ffc"/>', False),
        ('<text fill="#fff">white letters</text>', False),
    ],
)
def test_drawing_with_a_white_ground_is_found(tmp_path: Path, shape: str, is_white: bool) -> None:
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 300">{shape}</svg>'
    found = problems(tmp_path, '<img src="../x.svg">', x_DOT_svg=svg)
    said = "a/index.html: ../x.svg has a white ground, which shines in the dark palette"
    assert found == ([said] if is_white else [])
