"""How plots look: transparent, in greys that can be read on white and on black, with room for no frame."""

import contextlib
from collections.abc import Iterator
from typing import Any

from ..errors import ModelError

GREY = "#808080"
STYLE: Any = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.titlecolor": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "font.size": 10.0,
    "svg.hashsalt": "mini-vllm",  # so that the same results give the same file
}


@contextlib.contextmanager
def plotting() -> Iterator[None]:
    """Draw in this style, while the block lasts.

    Raises:
        ModelError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ModelError("Plots need matplotlib: run `pip install -e '.[bench]'`.") from None
    matplotlib.use("Agg")
    with matplotlib.rc_context(STYLE):
        yield
