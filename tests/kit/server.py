"""A milestone's server on a real socket, with SCRIPT, TINY or any other model behind it."""

import asyncio
import contextlib
import functools
import importlib
import json
import socket as sockets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.tokenizers import byte_tokenizer

USER = [{"role": "user", "content": "Hi"}]
PROMPT = byte_tokenizer().chat_token_ids(USER)  # of `server.chat()`; as long as this is a prompt for both endpoints


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

    def assert_idle(self) -> None:
        """Every request has left the engine, and every block has come back."""
        manager = self.engine.scheduler.block_manager
        wait_until(lambda: not self.engine.has_unfinished_requests(), "no request is left")
        wait_until(lambda: manager.num_free_blocks == manager.num_blocks, "all blocks are free")
        assert not self.engine.output_processor.parents
        self.engine.scheduler.check_integrity()


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 20) -> None:
    """Poll for what another thread, or process, is about to make true; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds} s it still does not hold that {what}"
        time.sleep(0.005)


@contextlib.contextmanager
def running(
    milestone: ModuleType,
    model: Any,
    *,
    tokenizer: Any = None,
    server: dict[str, Any] | None = None,
    defaults: dict[str, Any] | None = None,
    **engine: Any,
) -> Iterator[RunningServer]:
    """Serve `model` while the block lasts; at its end the engine must be idle again.

    Args:
        milestone: the package whose server it is.
        model: a folder, or a ready model (with BYTE-TOK, unless a `tokenizer` is given).
        tokenizer: for a ready model.
        server: fields of `ServerArgs`.
        defaults: the model's sampling, where a request is silent.
        engine: fields of `EngineArgs`.
    """
    module = importlib.import_module(f"{milestone.__name__}.server.app")
    args = module.ServerArgs(**({"served_model_name": ["tiny"]} | (server or {})))
    if hasattr(model, "forward"):
        tokenizer = tokenizer or byte_tokenizer()
    llm_engine = milestone.LLMEngine(model, tokenizer=tokenizer, **engine)
    app = module.build_app(llm_engine, args, defaults=defaults)
    socket = module.listening.bind(module.ServerArgs(port=0))
    uvicorn_server = uvicorn.Server(module.process.uvicorn_config(app, args))
    thread = threading.Thread(target=lambda: asyncio.run(uvicorn_server.serve([socket])), daemon=True)
    thread.start()
    running_server = RunningServer(f"http://127.0.0.1:{socket.getsockname()[1]}", llm_engine, app)
    wait_until(lambda: uvicorn_server.started, "the server has started")
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


class Gate:
    """Holds an engine before some of its steps (the first is 1), each until `go`; at the end it lets go of it."""

    def __init__(self, engine, *steps):
        self._engine = engine
        self._reached, self._open = ({step: threading.Event() for step in steps} for _ in range(2))
        self._step, self._number = engine.step, 0
        engine.step = self._held_step

    def __enter__(self):
        return self

    def __exit__(self, *_):
        del self._engine.step
        for event in self._open.values():
            event.set()

    def reached(self, step):
        assert self._reached[step].wait(20), f"the engine has not come to step {step}"

    def go(self, step):
        self._open[step].set()

    def _held_step(self):
        self._number += 1
        if self._number in self._open:
            self._reached[self._number].set()
            assert self._open[self._number].wait(20), f"nobody has let the engine do step {self._number}"
        return self._step()


@contextlib.contextmanager
def held(server, *steps):
    """A gate, and threads for clients that wait meanwhile: `submit(server.chat, ...)` gives a future."""
    with ThreadPoolExecutor() as clients, Gate(server.engine, *steps) as gate:
        yield gate, clients.submit


def bodies(response):
    """A stream's events, read, without the `[DONE]` at the end."""
    data = events(response)
    assert data.index("[DONE]") == len(data) - 1
    return [json.loads(event) for event in data[:-1]]


def connect(server, path, **body):
    """A socket on which the request has been sent; as HTTP/1.0, so that the answer comes as it is, not in chunks."""
    connection = sockets.create_connection((server.http.base_url.host, server.http.base_url.port), timeout=20)
    raw = json.dumps({"temperature": 0} | body).encode()
    head = f"POST {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


def wait_for_aborts(server, number):
    wait_until(lambda: metrics(server)["request_success_total/abort"] == number, f"{number} have left")


def wait_for_queue(server, number):
    wait_until(lambda: server.app.state.engine.num_waiting == number, f"{number} wait")


def text(chunks, index=0):
    """What a stream, of a chat or of completions, says in one of its choices."""
    choices = [choice for chunk in chunks for choice in chunk.get("choices", []) if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def answer(server, endpoints=("chat", "complete"), **body):
    """Text, finish reason and stop reason, after checking that both endpoints say the same, streamed and whole."""
    answers = set()
    for endpoint in endpoints:
        ask = functools.partial(getattr(server, endpoint), **{"prompt": PROMPT, "max_tokens": 50} | body)
        [whole] = ask().json()["choices"]
        whole_text = whole["message"]["content"] if endpoint == "chat" else whole["text"]
        answers.add((whole_text, whole["finish_reason"], whole["stop_reason"]))
        chunks = bodies(ask(stream=True))
        [last] = chunks[-1]["choices"]
        answers.add((text(chunks), last["finish_reason"], last["stop_reason"]))
    assert len(answers) == 1
    return answers.pop()


def only(response):
    """The one choice of an answer."""
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return choice


def texts(response):
    """The texts of a completion's choices, whose indices count from 0."""
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["text"] for choice in choices]


def token_counts(usage: dict[str, Any]) -> dict[str, int]:
    """`usage` without the details that v0.6 adds to it, which have a contract of their own."""
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


def counts(response):
    """Prompt and completion tokens, whose sum is the third."""
    usage = token_counts(response.json()["usage"])
    assert usage.keys() == {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"]


def streamed(response):
    """`{index: (text, finish_reason)}` of a stream; every choice ends once, with nothing after it."""
    answer = {}
    for chunk in bodies(response):
        for choice in chunk["choices"]:
            text, finish = answer.get(choice["index"], ("", None))
            assert finish is None
            new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            answer[choice["index"]] = (text + new, choice["finish_reason"])
    return answer


def access_lines(caplog):
    """What the log has said so far of requests that have ended."""
    return [record.getMessage() for record in caplog.records if record.name.endswith(".access")]


def post_lines(caplog, count):
    """The log's lines on POSTs, once there are so many: a line comes when its answer has gone."""

    def lines():
        return [line for line in access_lines(caplog) if line.startswith("POST ")]

    wait_until(lambda: len(lines()) == count, f"the log has {count} lines")
    return lines()


def metrics(server):
    """The values of /metrics by name, with a `finished_reason` behind a slash; buckets are left out."""
    response = server.http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    values = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            if not sample.name.startswith("vllm:"):  # from v0.10 on: what stands before the replicas has its own
                continue
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("tiny", "0")
            if "le" not in sample.labels:
                reason = sample.labels.get("finished_reason")
                values[sample.name.removeprefix("vllm:") + (f"/{reason}" if reason else "")] = sample.value
    return values
