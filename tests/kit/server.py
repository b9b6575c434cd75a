"""A milestone's server on a real socket, with SCRIPT, TINY or any other model behind it."""

import asyncio
import contextlib
import importlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import httpx
import uvicorn

from tests.kit.tokenizers import byte_tokenizer

USER = [{"role": "user", "content": "Hi"}]


@dataclass
class RunningServer:
    """A server that runs in a thread of this process: its address, the engine inside, and a client for both."""

    url: str
    engine: Any
    app: Any
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def chat(self, **body: Any) -> httpx.Response:
        """POST a conversation (`messages` unless given: one `Hi`)."""
        return self.http.post("/v1/chat/completions", json={"messages": USER, "temperature": 0} | body)

    def complete(self, **body: Any) -> httpx.Response:
        """POST a completion (`prompt` unless given: `Hi`)."""
        return self.http.post("/v1/completions", json={"prompt": "Hi", "temperature": 0} | body)

    def wait_until(self, condition: Any, what: str) -> None:
        """Poll for what another thread is about to make true; fails after 20 seconds."""
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, f"after 20 s it still does not hold that {what}"
            time.sleep(0.005)

    def assert_idle(self) -> None:
        """Every request has left the engine, and every block has come back."""
        manager = self.engine.scheduler.block_manager
        self.wait_until(lambda: not self.engine.has_unfinished_requests(), "no request is left")
        self.wait_until(lambda: manager.num_free_blocks == manager.num_blocks, "all blocks are free")
        assert not self.engine.output_processor.parents
        self.engine.scheduler.check_integrity()


@contextlib.contextmanager
def running(
    milestone: ModuleType, model: Any, *, tokenizer: Any = None, server: dict[str, Any] | None = None, **engine: Any
) -> Iterator[RunningServer]:
    """Serve `model` while the block lasts; at its end the engine must be idle again.

    Args:
        milestone: the package whose server it is.
        model: a folder, or a ready model (with BYTE-TOK, unless a `tokenizer` is given).
        tokenizer: for a ready model.
        server: fields of `ServerArgs`.
        engine: fields of `EngineArgs`.
    """
    module = importlib.import_module(f"{milestone.__name__}.server")
    args = module.ServerArgs(**({"served_model_name": ["tiny"]} | (server or {})))
    if hasattr(model, "forward"):
        tokenizer = tokenizer or byte_tokenizer()
    llm_engine = milestone.LLMEngine(model, tokenizer=tokenizer, **engine)
    app = module.build_app(llm_engine, args)
    socket = module._bind(module.ServerArgs(port=0))
    uvicorn_server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    thread = threading.Thread(target=lambda: asyncio.run(uvicorn_server.serve([socket])), daemon=True)
    thread.start()
    running_server = RunningServer(f"http://127.0.0.1:{socket.getsockname()[1]}", llm_engine, app)
    running_server.wait_until(lambda: uvicorn_server.started, "the server has started")
    try:
        yield running_server
        if app.state.engine.is_alive:
            running_server.assert_idle()
    finally:
        running_server.http.close()
        uvicorn_server.should_exit = True
        thread.join(timeout=30)
        assert not thread.is_alive(), "the server has not ended"


def events(response: httpx.Response) -> list[str]:
    """The `data` of a stream's events, `[DONE]` included; the raw form is checked on the way."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines), response.text
    return [line.removeprefix("data: ") for line in lines]
