"""The command line: one replica is served here, as ever; for more of them Ray is started."""

import argparse
import importlib.util

from common import cli
from common.errors import ModelError

from ..engine_args import EngineArgs
from ..server import app as server
from ..server.server_args import ServerArgs
from .cluster_args import ClusterArgs


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal comes; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__.partition('.')[0]}",
        description="Serve a Llama over HTTP, as OpenAI's API does, by one engine or by several.",
    )
    add_flags(parser)
    return cli.run(lambda: _serve(parser.parse_args(argv)))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """All flags there are."""
    cli.add_arguments(parser, ClusterArgs, title="cluster")
    cli.add_arguments(parser, ServerArgs, title="server")
    cli.add_arguments(parser, EngineArgs, title="engine")


def from_flags(args: argparse.Namespace) -> tuple[ClusterArgs, ServerArgs, EngineArgs]:
    """What was said with them; raises `ModelError` for a value that cannot be used."""
    return (
        cli.from_arguments(ClusterArgs, args),
        cli.from_arguments(ServerArgs, args),
        cli.from_arguments(EngineArgs, args),
    )


def _serve(args: argparse.Namespace) -> None:
    cluster_args = cli.from_arguments(ClusterArgs, args)
    if not cluster_args.needs_ray:
        server.serve(args)
        return
    if importlib.util.find_spec("ray") is None:
        raise ModelError("Several replicas need Ray: install it with `pip install -e '.[ray]'`.")
    from .local import serve

    serve(*from_flags(args))
