"""Where the server listens: a port or a Unix socket, plain or with TLS, and the URL by which it is reached there."""

import contextlib
import os
import socket
import ssl
import stat
from pathlib import Path

from common.errors import ModelError

from .server_args import ServerArgs


def bind(args: ServerArgs) -> socket.socket:
    """The socket that connections come to, listening.

    Raises:
        ModelError: the address is taken or not ours, or the certificate cannot be used.
    """
    _check_certificate(args)
    if args.uds is not None:
        return _bind_path(args.uds)
    try:
        family = socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM)[0][0]
        # `::` is every address, IPv4's too, as 0.0.0.0 is all of those.
        every = family == socket.AF_INET6 and args.host == "::" and socket.has_dualstack_ipv6()
        address = (args.host, args.port)
        listener = socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=every)
        # Connections inherit it. asyncio would set it, but not on sockets made elsewhere; without it, the second packet
        # of an answer waits until the client has acknowledged the first, which it delays by some 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, UnicodeError) as error:  # the second for a name that DNS could not carry
        raise ModelError(
            f"Cannot listen on {args.host}, port {args.port}: {_reason(error)}. Choose others with --host and --port."
        ) from None


def url(args: ServerArgs, listener: socket.socket) -> str:
    """The server's own URL, without a slash at its end; behind a proxy clients have another."""
    scheme = "https" if args.ssl_certfile is not None else "http"
    if args.uds is not None:
        return f"{scheme}://localhost{args.root_path}"
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{host}:{port}{args.root_path}"


def remove(args: ServerArgs) -> None:
    """The Unix socket's file, which outlives the socket."""
    if args.uds is not None:
        Path(args.uds).unlink(missing_ok=True)


def _bind_path(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(path).st_mode) and not _has_listener(path):
                os.unlink(path)  # a server that was killed has left it
        listener.bind(path)
        os.chmod(path, 0o666)  # a proxy may run as another user; the folder says who comes so far
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ModelError(f"Cannot listen on {path}: {_reason(error)}. Choose another with --uds.") from None
    return listener


def _has_listener(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


def _check_certificate(args: ServerArgs) -> None:
    if args.ssl_certfile is None:
        return
    for name in ("ssl_certfile", "ssl_keyfile"):
        file = getattr(args, name)
        if file is not None and not Path(file).is_file():
            raise ModelError(f"{name}: there is no file {file}.")
    try:
        # A password would be asked for on the terminal, where nobody may be.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(args.ssl_certfile, args.ssl_keyfile, password="")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"ssl_certfile and ssl_keyfile cannot be used ({_reason(error)}): they must be PEM files, the certificate "
            "and its private key without a password."
        ) from None


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).partition(" (while ")[0]  # what would follow is the address
