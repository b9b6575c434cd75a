"""The server's own flags, beside the engine's (`engine_args.py`), named as vLLM's where it has them. Torch-free."""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import ModelError, shown
from common.units import check_count, parse_bytes

LOG_LEVELS = ("debug", "info", "warning", "error")


def check_api_key(name: str, key: str) -> None:
    """Raise a `ModelError` for a key that no client could send in a header."""
    if not key.isascii() or not key.isprintable() or key != key.strip():
        raise ModelError(f"{name} has blanks around it, or characters that no header can carry: give the bare key.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerArgs:
    """How the server listens and whom it serves.

    Raises:
        ModelError: a value is out of its range.
    """

    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on; 0.0.0.0 is every interface"})
    port: int = field(default=8000, metadata={"help": "port to listen on; 0 takes a free one"})
    uds: str | None = field(
        default=None, metadata={"help": "path of a Unix socket to listen on, in place of host and port"}
    )
    ssl_certfile: str | None = field(default=None, metadata={"help": "PEM file of the certificate: serves HTTPS"})
    ssl_keyfile: str | None = field(
        default=None, metadata={"help": "PEM file of its private key (default: it is in the certificate's file)"}
    )
    root_path: str = field(default="", metadata={"help": "prefix under which a proxy serves this server, such as /llm"})
    chat_template: str | None = field(
        default=None, metadata={"help": "file with a Jinja chat template, in place of the model's own"}
    )
    generation_config: str = field(
        default="auto",
        metadata={
            "help": "where the sampling defaults come from: auto is the model's generation_config.json, "
            "vllm none at all, or a folder that has such a file"
        },
    )
    enable_tokenizer_info_endpoint: bool = field(
        default=False, metadata={"help": "serve GET /tokenizer_info: the tokenizer's configuration and chat template"}
    )
    served_model_name: list[str] | None = field(
        default=None, metadata={"help": "name of the model in the API (may be repeated; default: what --model says)"}
    )
    api_key: list[str] | None = field(
        default=None,
        metadata={"help": "clients must send one of these keys (may be repeated; default: MINI_VLLM_API_KEY, or none)"},
    )
    max_queued_requests: int = field(
        default=1024, metadata={"help": "sequences that may wait; past it requests are refused with 503"}
    )
    max_body_size: str | None = field(
        default=None,
        metadata={"help": "largest body of a request, such as 4MiB (default: what may fit the context, 1MiB to 8MiB)"},
    )
    shutdown_timeout: float = field(
        default=10.0, metadata={"help": "seconds that running requests have to end after SIGTERM or Ctrl-C"}
    )
    allow_control: bool = field(
        default=False, metadata={"help": "let the visualizer pause the engine and slow it down, for all callers"}
    )
    max_recorded_events: int = field(
        default=200_000,
        metadata={"help": "events that the visualizer's recording may hold, some 150 bytes each; 0 records nothing"},
    )
    allowed_origins: str = field(
        default='["*"]', metadata={"help": "JSON list of the origins whose web pages may call the server"}
    )
    log_level: str = field(default="info", metadata={"help": "how much to log", "choices": LOG_LEVELS})

    def __post_init__(self) -> None:
        if not self.host.strip():
            raise ModelError("host is empty: leave it out for 127.0.0.1, or give 0.0.0.0 for every interface.")
        if not 0 <= self.port <= 65535:
            raise ModelError(f"port must be from 0 to 65535, got {self.port}.")
        if any(not key.strip() for key in self.api_key or ()):
            raise ModelError("api_key is empty: leave it out, or give a key (was a variable of the shell not set?).")
        for key in self.api_key or ():
            check_api_key("api_key", key)
        if any(not name.strip() for name in self.served_model_name or ()):
            raise ModelError("served_model_name is empty: leave it out, or give a name.")
        for name in self.served_model_name or ():
            if not name.isprintable():  # bytes that are no UTF-8 come as lone surrogates, which are not
                raise ModelError(f"served_model_name is not printable text: {shown(name)}. JSON could not carry it.")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ModelError("ssl_keyfile needs ssl_certfile, the certificate that the key belongs to.")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ModelError(f"root_path must begin with a slash and end without, got {shown(self.root_path)}.")
        check_count("max_queued_requests", self.max_queued_requests)
        if self.max_recorded_events < 0:
            raise ModelError(f"max_recorded_events must be at least 0, got {self.max_recorded_events}.")
        if self.max_body_size is not None:
            parse_bytes(self.max_body_size, "max_body_size")
        if not 0 <= self.shutdown_timeout < float("inf"):
            raise ModelError(f"shutdown_timeout must be at least 0 seconds, got {self.shutdown_timeout}.")
        if self.origins is None:
            raise ModelError(f"""allowed_origins must be a JSON list such as '["*"]', got {self.allowed_origins!r}.""")

    def read_chat_template(self) -> str | None:
        """The text of the file that `chat_template` names; raises `ModelError` where it cannot be read."""
        if self.chat_template is None:
            return None
        try:
            return Path(self.chat_template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ModelError(f"chat_template: {self.chat_template} cannot be read: {reason}.") from None

    @property
    def max_body_bytes(self) -> int | None:
        """`max_body_size` in bytes."""
        return None if self.max_body_size is None else parse_bytes(self.max_body_size, "max_body_size")

    @property
    def origins(self) -> list[str] | None:
        """`allowed_origins` read; `None` where it is no JSON list of strings."""
        try:
            origins = json.loads(self.allowed_origins)
        except json.JSONDecodeError:
            return None
        is_list = isinstance(origins, list) and all(isinstance(origin, str) for origin in origins)
        return origins if is_list else None

    @property
    def level(self) -> int:
        """The log level, as `logging` knows it."""
        return logging.getLevelNamesMapping()[self.log_level.upper()]
