"""The picture of the page: `python -m v0_10_scale_out.measurements.pictures`.

    replicas.png          two replicas side by side, while three assistants with system prompts of their own answer

It needs Playwright (`pip install -e '.[browser]'`) and Chromium.
"""

import argparse
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common.measuring.browser import launched
from common.measuring.recipe import ROOT

from .load import Server

SYSTEM = "You are a helpful {}, and you explain everything slowly, in simple words and with many examples. "
QUESTIONS = {
    "cook": ("What is bread?", "How do I bake a cake?", "What is soup?"),
    "gardener": ("What do plants need?", "When do I sow beans?", "What is compost?"),
    "sailor": ("Why does the wind blow?", "What are waves?", "Why is the sea salty?"),
}
NUM_TOKENS = 400


def main() -> None:
    """Make it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img" / "replicas.png")
    args = parser.parse_args()
    with Server(1, 2, num_blocks=240) as server, launched() as browser, ThreadPoolExecutor(9) as pool:
        page = browser.new_page(viewport={"width": 1440, "height": 1500})
        page.goto(f"http://127.0.0.1:{server.port}/visualizer/")
        page.locator("iframe").nth(1).wait_for()
        page.wait_for_timeout(5000)  # until both frames are there: their files are requests, too, and count as load
        for turn in range(3):
            for user, questions in QUESTIONS.items():
                pool.submit(_ask, server.port, 3 * SYSTEM.format(user), questions[turn])
                page.wait_for_timeout(300)
        page.locator("summary").click()
        page.wait_for_timeout(3000)
        for number in range(2):
            page.frame_locator("iframe").nth(number).locator("#pool").scroll_into_view_if_needed()
        page.locator("h1").scroll_into_view_if_needed()
        page.screenshot(path=args.out)
    print(f"{args.out.name}: {args.out.stat().st_size >> 10} KiB")


def _ask(port: int, system: str, question: str) -> Any:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


if __name__ == "__main__":
    main()
