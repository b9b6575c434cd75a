"""The pictures of the page: `python -m v0_8_visualizer.measurements.pictures`, after `recordings`.

    visualizer.png        the recording of a tight pool, at the step in which a request has lost its blocks
    visualizer_dark.png   the same in the dark
    visualizer.gif        the recording of shared blocks, step by step

It needs Playwright (`pip install -e '.[browser]'`) and Chromium, and a font with emoji.
"""

import argparse
import io
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.measuring.browser import launched, served
from common.measuring.recipe import ROOT

WEB, RECORDINGS = ROOT / "v0_8_visualizer" / "web", ROOT / "docs" / "recordings"
WIDTH, HEIGHT = 1280, 900
GIF_WIDTH = 800
FRAME_MS, LAST_MS = 450, 2500


def main() -> None:
    """Make them all."""
    from PIL import Image

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img", help="default: the site's pictures")
    parser.add_argument("--step", type=int, default=31, help="of the recording `preemption` (default: 31)")
    args = parser.parse_args()
    with site() as address, launched() as browser:

        def page_at(recording: str, step: int, scheme: Any) -> Any:
            page = browser.new_page(
                viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme, reduced_motion="reduce"
            )
            page.goto(f"{address}/visualizer/index.html?recording=../recordings/{recording}.jsonl&step={step}")
            show(page, step)
            return page

        for scheme, name in (("light", "visualizer.png"), ("dark", "visualizer_dark.png")):
            page_at("preemption", args.step, scheme).screenshot(path=args.out / name)
        page = page_at("sharing", 0, "light")
        frames = []
        for step in range(num_steps("sharing")):
            page.evaluate("step => window.visualizer.source.player.goToStep(step)", step)
            show(page, step)
            frames.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
    size = (GIF_WIDTH, HEIGHT * GIF_WIDTH // WIDTH)
    small = [frame.resize(size, Image.Resampling.LANCZOS).quantize(64, dither=Image.Dither.NONE) for frame in frames]
    times = [FRAME_MS] * (len(small) - 1) + [LAST_MS]
    small[0].save(
        args.out / "visualizer.gif", save_all=True, append_images=small[1:], duration=times, loop=0, optimize=True
    )
    for name in ("visualizer.png", "visualizer_dark.png", "visualizer.gif"):
        print(f"{name}: {(args.out / name).stat().st_size >> 10} KiB")


def num_steps(recording: str) -> int:
    """How many steps it has."""
    return (RECORDINGS / f"{recording}.jsonl").read_text().count('"type": "step"')


def show(page: Any, step: int) -> None:
    """Wait until this step is drawn."""
    page.wait_for_function("step => window.visualizer.state.step === step", arg=step)
    page.wait_for_timeout(150)


@contextmanager
def site() -> Iterator[str]:
    """The address of the page and the recordings, in folders as the site has them."""
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(WEB, Path(name, "visualizer"))
        shutil.copytree(RECORDINGS, Path(name, "recordings"))
        with served(Path(name)) as address:
            yield address


if __name__ == "__main__":
    main()
