"""Records `tools/recording.sh` as an asciicast and a GIF: `make recording`, or `python -m tools.record`.

A real run, in a terminal of 100 columns, with pauses shortened to at most a second and a half. The GIF must stay below
2 MB, and a run that failed is no recording: both are errors.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from common.cli import run
from common.errors import ModelError

ROOT = Path(__file__).parent.parent
MAX_BYTES = 2 * 2**20
COLUMNS, ROWS, LONGEST_PAUSE = 100, 27, 1.5


def main(argv: list[str] | None = None) -> int:
    """Record; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.record", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img", help="folder of demo.cast and demo.gif")
    args = parser.parse_args(argv)
    return run(lambda: _record(args.out, Path(sys.executable).parent))


def _record(folder: Path, binaries: Path) -> None:
    cast, gif = folder / "demo.cast", folder / "demo.gif"
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
    look = ["--renderer", "resvg", "--fps-cap", "10", "--font-size", "15", "--theme", "asciinema"]
    _call([str(binaries / "agg"), *look, str(cast), str(gif)], environment)
    num_bytes = gif.stat().st_size
    if num_bytes > MAX_BYTES:
        raise ModelError(f"{gif} has {num_bytes:,} bytes, more than {MAX_BYTES:,}: show less, or fewer frames.")
    print(f"{cast}\n{gif}: {num_bytes:,} bytes")


def _call(command: list[str], environment: dict[str, str]) -> None:
    try:
        subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
    except FileNotFoundError:
        raise ModelError(f"{command[0]} is not there: run `pip install -e '.[recording]'`.") from None
    except subprocess.CalledProcessError as error:
        raise ModelError(f"{Path(command[0]).name} ended with exit code {error.returncode}.") from None


if __name__ == "__main__":
    sys.exit(main())
