"""The server's own flags, beside the engine's (`engine_args.py`), named as vLLM's where it has them. Torch-free."""

import json
import logging
from dataclasses import dataclass, field

from common.errors import ModelError
from common.units import check_count

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerArgs:
    """How the server listens and whom it serves.

    Raises:
        ModelError: a value is out of its range.
    """

    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on; 0.0.0.0 is every interface"})
    port: int = field(default=8000, metadata={"help": "port to listen on; 0 takes a free one"})
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
    shutdown_timeout: float = field(
        default=10.0, metadata={"help": "seconds that running requests have to end after SIGTERM or Ctrl-C"}
    )
    allowed_origins: str = field(
        default='["*"]', metadata={"help": "JSON list of the origins whose web pages may call the server"}
    )
    log_level: str = field(default="info", metadata={"help": "how much to log", "choices": LOG_LEVELS})

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ModelError(f"port must be from 0 to 65535, got {self.port}.")
        if any(not key.strip() for key in self.api_key or ()):
            raise ModelError("api_key is empty: leave it out, or give a key (was a variable of the shell not set?).")
        if any(not name.strip() for name in self.served_model_name or ()):
            raise ModelError("served_model_name is empty: leave it out, or give a name.")
        check_count("max_queued_requests", self.max_queued_requests)
        if not 0 <= self.shutdown_timeout < float("inf"):
            raise ModelError(f"shutdown_timeout must be at least 0 seconds, got {self.shutdown_timeout}.")
        if self.origins is None:
            raise ModelError(f"""allowed_origins must be a JSON list such as '["*"]', got {self.allowed_origins!r}.""")

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
