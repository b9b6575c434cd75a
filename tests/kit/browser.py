"""Headless Chromium for tests of the page; where it, or Playwright, is not installed, these tests are skipped."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from common.measuring.browser import chromium, launched


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A browser of Playwright's."""
    pytest.importorskip("playwright.sync_api", reason="the tests of the page need `pip install -e '.[browser]'`")
    if chromium() is None:
        pytest.skip("the tests of the page need Chromium: Debian's package is chromium-headless-shell")
    with launched() as found:
        yield found


@contextlib.contextmanager
def page_of(server: Any, browser: Any, path: str = "/visualizer/", **options: Any) -> Iterator[Any]:
    """The visualizer of a server. At the end the console must have no error, and no request have gone elsewhere."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 1000}, "reduced_motion": "reduce"} | options)
    context.set_default_timeout(20_000)
    page = context.new_page()
    page.errors, page.requests = [], []
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("request", lambda request: page.requests.append(request.url))
    page.goto(server.url + path)
    try:
        yield page
        assert page.errors == []
        assert [url for url in page.requests if not url.startswith((server.url, "blob:", "data:"))] == []
    finally:
        context.close()


def is_live(page: Any) -> None:
    """Wait until the page has its snapshot."""
    page.wait_for_selector('#connection[data-state="open"]')
    page.wait_for_function("() => window.visualizer?.state?.settings != null")


def grid(page: Any) -> dict[int, tuple[str, ...]]:
    """The owners of each block, as the page shows them; blocks without any are left out."""
    pairs = page.eval_on_selector_all(
        "#pool [data-block]", "blocks => blocks.map(b => [Number(b.dataset.block), b.dataset.owners ?? ''])"
    )
    return {block: tuple(sorted(owners.split())) for block, owners in pairs if owners}


def account(engine: Any) -> dict[int, tuple[str, ...]]:
    """The same, as the block manager has it."""
    owners: dict[int, list[str]] = {}
    for request in engine.scheduler.running:
        for block in engine.scheduler.block_manager.block_table(request.request_id):
            owners.setdefault(block, []).append(request.request_id)
    return {block: tuple(sorted(ids)) for block, ids in owners.items()}
