"""Start a server, stream one answer through OpenAI's own client, stop it: `python -m tools.demo_server`.

With `--base-url` the server is one that runs already, and goes on.
"""

import argparse
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from common.cli import run
from common.errors import ModelError

ROOT = Path(__file__).parent.parent
SERVER = "v0_4_http"


def main(argv: list[str] | None = None) -> int:
    """Ask the server of `argv`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_server", description=__doc__)
    parser.add_argument("question", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--max-tokens", type=int, default=60)
    parser.add_argument("--model", help="what the server's --model takes (default: the default model)")
    parser.add_argument("--base-url", help="of a server that runs, such as http://127.0.0.1:8000 (default: start one)")
    args = parser.parse_args(argv)
    return run(lambda: _demo(args))


def _demo(args: argparse.Namespace) -> None:
    try:
        from openai import OpenAI
    except ImportError:
        raise ModelError("The client is not installed: run `pip install openai`.") from None
    flags = ["--log-level", "warning", *(["--model", args.model] if args.model else [])]
    with nullcontext(args.base_url) if args.base_url else running(SERVER, flags) as address:
        address = address.rstrip("/")
        client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        print(f"> {args.question}", file=sys.stderr)
        stream = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": args.question}],
            max_tokens=args.max_tokens,
            temperature=0.0,
            stream=True,
        )
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print(flush=True)


@contextmanager
def running(module: str, flags: Sequence[str]) -> Iterator[str]:
    """The address of a server that is started on a free port, unless the flags name one, and ended afterwards."""
    command = [sys.executable, "-m", module, "--port", "0", *flags]
    # What concerns the reader is in stderr. To stdout Ray writes that its parts were ended, which is in order.
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        try:
            yield _address(module, server)
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                code = server.wait(timeout=120)
            except subprocess.TimeoutExpired:
                server.kill()
                raise
    print(f"The server has ended with exit code {code}.", file=sys.stderr)


def _address(module: str, server: "subprocess.Popen[str]") -> str:
    """Pass on what the server prints until it says where it listens."""
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.match(r"Listening on (http://\S+)", line):
            print(f"Listening on {found[1]}", file=sys.stderr)
            return found[1]
        print(line, end="", file=sys.stderr)
    raise ModelError(f"{module} did not start: what it said is above.")


if __name__ == "__main__":
    sys.exit(main())
