"""Records `tools/recording.sh` as an asciicast and a GIF: `make recording`, or `python -m tools.record`.

A real run, in a terminal of 100 columns, with pauses shortened to at most a second and a half. The GIF must stay below
2 MB, and a run that failed is no recording: both are errors.

Where a GIF does not move (a preview, a printed page, a reader who wants less motion), its first frame is all there is.
So the GIF begins with the last screen, which has the results, and then shows how they came about.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common.cli import run
from common.errors import ModelError

ROOT = Path(__file__).parent.parent
MAX_BYTES = 2 * 2**20
COLUMNS, ROWS, LONGEST_PAUSE = 100, 27, 1.5
LAST_SCREEN_FIRST = 1.5  # seconds for which the GIF shows the results before it begins
CLEAR = "\x1bc"  # the terminal as it is when it is opened


def main(argv: list[str] | None = None) -> int:
    """Record; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.record", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img", help="folder of demo.cast and demo.gif")
    parser.add_argument("--gif-only", action="store_true", help="record nothing: make demo.gif from demo.cast again")
    args = parser.parse_args(argv)
    make = _draw if args.gif_only else _record
    return run(lambda: make(args.out, Path(sys.executable).parent))


def _record(folder: Path, binaries: Path) -> None:
    cast = folder / "demo.cast"
    environment = os.environ | {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "LC_ALL": "C.UTF-8",
        "TERM": "xterm-256color",
    }
    status = folder / "demo.status"  # asciinema ends with 0, whatever becomes of the command
    command = f"bash {ROOT / 'tools' / 'recording.sh'}; echo $? > {status}"
    size = ["--cols", str(COLUMNS), "--rows", str(ROWS), "--idle-time-limit", str(LONGEST_PAUSE)]
    try:
        _call([str(binaries / "asciinema"), "rec", "-q", "--overwrite", *size, "-c", command, str(cast)], environment)
        if status.read_text().strip() != "0":
            raise ModelError(f"The recorded command failed: look at {cast}.")
    finally:
        status.unlink(missing_ok=True)
    print(cast)
    _draw(folder, binaries)


def _draw(folder: Path, binaries: Path) -> None:
    gif = folder / "demo.gif"
    look = ["--renderer", "resvg", "--fps-cap", "10", "--font-size", "15", "--theme", "asciinema"]
    with tempfile.TemporaryDirectory() as temporary:
        cast = Path(temporary) / "demo.cast"
        cast.write_text(_with_last_screen_first((folder / "demo.cast").read_text(encoding="utf-8")), encoding="utf-8")
        _call([str(binaries / "agg"), *look, str(cast), str(gif)], dict(os.environ))
    num_bytes = gif.stat().st_size
    if num_bytes > MAX_BYTES:
        raise ModelError(f"{gif} has {num_bytes:,} bytes, more than {MAX_BYTES:,}: show less, or fewer frames.")
    print(f"{gif}: {num_bytes:,} bytes")


def _with_last_screen_first(cast: str) -> str:
    """The cast with everything it prints at its beginning, too, which leaves its last screen; then it is cleared."""
    header, *lines = cast.splitlines()
    events = [json.loads(line) for line in lines]
    everything = "".join(text for _, kind, text in events if kind == "o")
    first = [[0.0, "o", everything], [LAST_SCREEN_FIRST, "o", CLEAR]]
    later = [[round(seconds + LAST_SCREEN_FIRST, 6), kind, text] for seconds, kind, text in events]
    return "\n".join([header, *(json.dumps(event, ensure_ascii=False) for event in first + later)]) + "\n"


def _call(command: list[str], environment: dict[str, str]) -> None:
    try:
        subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
    except FileNotFoundError:
        raise ModelError(f"{command[0]} is not there: run `pip install -e '.[recording]'`.") from None
    except subprocess.CalledProcessError as error:
        raise ModelError(f"{Path(command[0]).name} ended with exit code {error.returncode}.") from None


if __name__ == "__main__":
    sys.exit(main())
