"""The server as its operator meets it: a process with a banner, flags, signals and an exit code."""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kit import server as kit
from tests.kit.checkpoints import tiny_llama
from tests.kit.tokenizers import byte_tokenizer, save_byte_tokenizer

ROOT = Path(__file__).parents[2]
TLS = ROOT / "tests" / "kit" / "tls"  # a certificate for this machine, and its key
SECONDS = 120  # for a start, also of Ray, while other tests keep the machine busy
wait_until = functools.partial(kit.wait_until, seconds=SECONDS)
HEAVY = ("torch", "transformers", "tokenizers", "fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client")


class Server:
    """A server process: what it has written to stderr so far, its address, and its end."""

    def __init__(self, *args: Any, module: str = "v0_4_http", environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", module, "--port", "0", "--kv-cache-memory", "128MiB", *map(str, args)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True)
        self._reader.start()
        wait_until(lambda: self.text.count("}'\n") or self.has_ended, "it listens")
        assert not self.has_ended, self.text
        self.address = re.search(r"Listening on (\S+) ", self.text)[1]
        port = re.fullmatch(r"https?://\S+:(\d+)\S*", self.address)
        self.port = int(port[1]) if port else None
        self.url = f"http://127.0.0.1:{self.port}"
        if self.address.startswith(self.url):
            wait_until(lambda: self.is_healthy, "it answers")

    @property
    def text(self) -> str:
        return "".join(list(self.lines))

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def is_healthy(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", trust_env=False, timeout=SECONDS).status_code == 200
        return False

    @property
    def num_running(self) -> int:
        metrics = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=SECONDS).text
        return int(float(re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", metrics, re.MULTILINE)[1]))

    @property
    def refuses_connections(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS).close()
        except ConnectionRefusedError:
            return True
        return False

    def end(self, timeout: float = SECONDS) -> int:
        """Wait for the end; the exit code."""
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code


@contextlib.contextmanager
def served(*args: Any, **options: Any) -> Iterator[Server]:
    server = Server(*args, **options)
    try:
        yield server
    finally:
        server.process.kill()
        server.end()
        server.process.stdout.close()


class Post:
    """A completion that a thread waits for: its `response`, once it is `done`."""

    def __init__(self, url: str, **body: Any) -> None:
        self.response: httpx.Response | None = None
        body = {"prompt": "Hi", "temperature": 0, "ignore_eos": True} | body
        self._thread = threading.Thread(target=self._post, args=(url, body), daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def _post(self, url: str, body: dict[str, Any]) -> None:
        self.response = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS, trust_env=False)


class OpenStream:
    """A streamed completion that is read in a thread: its events, `done` when the connection has ended."""

    def __init__(self, url: str, **body: Any) -> None:
        self.events: list[str] = []
        self.error: Exception | None = None
        body = {"prompt": "Hi", "temperature": 0, "ignore_eos": True, "stream": True} | body
        self._thread = threading.Thread(target=self._read, args=(url, body), daemon=True)
        self._thread.start()
        wait_until(lambda: self.events or self.done, "the stream has begun")
        assert self.error is None

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """What the events say, but for the `[DONE]` that must be the last."""
        assert self.events[-1] == "[DONE]"
        return [json.loads(event) for event in self.events[:-1]]

    def _read(self, url: str, body: dict[str, Any]) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=SECONDS, trust_env=False) as response:
                assert response.status_code == 200
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
        except Exception as error:
            self.error = error


def idle_connection(port: int) -> socket.socket:
    """A connection that has been answered once, and stays open."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    received = b""
    while not received.endswith(b'{"status":"ok"}'):
        received += connection.recv(4096)
    return connection


def half_request(server: Server) -> socket.socket:
    """A connection that has sent the first half of a request, and sends no more."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS)
    connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt"')
    assert server.is_healthy  # a whole round trip, after which the half request has come in, too
    return connection


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """TINY with a context so long that an answer lasts until somebody ends it."""
    folder = tmp_path_factory.mktemp("endless")
    tiny_llama(folder, vocab_size=byte_tokenizer().vocab_size, max_position_embeddings=200_000)
    save_byte_tokenizer(folder)
    return folder


@pytest.mark.parametrize("module", ["v0_4_http", "v0_4_http.server"])
def test_it_says_what_it_serves_and_a_curl_line_that_works_and_ends_at_once_without_requests(tiny, module):
    # 2 layers, 2 KV heads of 16, K and V, 4 bytes each: 512 bytes a token, so that 1 MiB holds 2,048.
    with served(
        "--model", tiny.folder, "--kv-cache-memory", "1MiB", "--shutdown-timeout", 300, module=module
    ) as server:
        assert f"\n{tiny.folder}, float32 on cpu\n" in server.text
        assert "\nKV capacity: 2,048 tokens in all, up to 512 a request\n" in server.text
        assert f"Documentation: {server.url}/docs" in server.text
        command = re.search(r"^  (curl .*?}')$", server.text, re.MULTILINE | re.DOTALL)[1]
        assert command.startswith(f"curl -N {server.url}/v1/chat/completions ")
        if shutil.which("curl"):
            done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=SECONDS)
            assert done.returncode == 0, done.stderr
            assert done.stdout.startswith('data: {"id":"chatcmpl-')
            assert done.stdout.endswith("data: [DONE]\n\n")
        server.process.send_signal(signal.SIGTERM)
        assert server.end(30) == 0, server.text  # of the 300 that a request might have had
        assert "Traceback" not in server.text
        assert server.process.stdout.read() == ""


def test_the_model_is_served_by_the_names_that_the_flags_give_with_the_key_of_the_environment(tiny):
    names = ["--served-model-name", "one", "--served-model-name", "two"]
    with served("--model", tiny.folder, *names, environment={"MINI_VLLM_API_KEY": "secret"}) as server:
        assert server.text.count("\none, float32 on cpu\n") == 1
        client = httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False)
        assert client.get("/v1/models").status_code == 401
        client.headers["Authorization"] = "Bearer secret"
        models = [(model["id"], model["root"]) for model in client.get("/v1/models").json()["data"]]
        assert models == [("one", str(tiny.folder)), ("two", str(tiny.folder))]
        body = {"model": "two", "prompt": "Hi", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body).json()
        assert answer["model"] == "two"
        assert answer["choices"][0]["text"] == byte_tokenizer().decode(tiny.tokens([72, 105], 8))
        assert "secret" not in server.text
        client.close()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_api_12_a_signal_lets_an_open_stream_end_and_takes_no_connection_more(endless, sig):
    with served("--model", endless, "--shutdown-timeout", SECONDS) as server:
        idle = idle_connection(server.port)
        stream = OpenStream(server.url, max_tokens=600)
        server.process.send_signal(sig)
        wait_until(lambda: server.refuses_connections, "new connections are refused")
        assert server.end() == 0, server.text
        wait_until(lambda: stream.done, "the stream has ended")
        assert stream.error is None
        assert stream.bodies[-1]["choices"][0]["finish_reason"] == "length"
        assert not any("error" in body for body in stream.bodies)
        assert idle.recv(1) == b""  # closed in order, not reset
        idle.close()
        assert "Traceback" not in server.text
        assert "output_tokens=600" in server.text


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_api_12_what_does_not_end_in_time_is_cut_a_stream_by_an_error_and_done_a_whole_answer_by_503(endless, sig):
    with served("--model", endless, "--shutdown-timeout", 0.5) as server:
        idle = idle_connection(server.port)
        whole = Post(server.url, max_tokens=100_000)
        wait_until(lambda: server.num_running == 1, "the whole answer is under way")
        stream = OpenStream(server.url, max_tokens=100_000)
        server.process.send_signal(sig)
        assert server.end(30) == 0, server.text
        wait_until(lambda: stream.done and whole.done, "both have ended")
        assert stream.error is None
        *bodies, last = stream.bodies
        error = {
            "message": "The server is shutting down: this answer was cut short.",
            "type": "service_unavailable_error",
            "param": None,
            "code": None,
        }
        assert last == {"error": error}
        assert bodies
        assert all(body["choices"][0]["finish_reason"] is None for body in bodies)
        assert (whole.response.status_code, whole.response.json()) == (503, {"error": error})
        assert server.refuses_connections
        assert idle.recv(1) == b""
        idle.close()
        assert "Not ended in time, and aborted: 2." in server.text
        assert "Traceback" not in server.text


def test_unt_60_a_client_that_never_finishes_its_request_does_not_hold_the_end_up(tiny):
    with served("--model", tiny.folder, "--shutdown-timeout", 300) as server:
        half = half_request(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.end(30) == 0, server.text
        half.close()
        assert "Traceback" not in server.text


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_unt_12_the_host_with_two_colons_is_every_address_of_ipv4_too(tiny):
    with served("--model", tiny.folder, "--host", "::") as server:
        assert server.address == f"http://[::1]:{server.port}"
        for host in ("127.0.0.1", "[::1]"):
            wait_until(lambda: answers(f"http://{host}:{server.port}"), f"{host} answers")  # noqa: B023


def answers(url: str, **options: Any) -> bool:
    with contextlib.suppress(httpx.TransportError), httpx.Client(trust_env=False, timeout=SECONDS, **options) as http:
        return http.get(f"{url}/health").json() == {"status": "ok"}
    return False


def test_unt_17_the_environments_key_is_taken_without_the_blanks_around_it(tiny):
    with served("--model", tiny.folder, environment={"MINI_VLLM_API_KEY": " secret\n"}) as server:
        for key, status in (("secret", 200), ("other", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            assert httpx.get(f"{server.url}/v1/models", headers=headers, trust_env=False).status_code == status


def test_the_variable_of_vllms_key_is_not_read_and_the_start_says_so(tiny):
    with served("--model", tiny.folder, environment={"VLLM_API_KEY": "secret"}) as server:
        assert httpx.get(f"{server.url}/v1/models", trust_env=False).status_code == 200
        assert "VLLM_API_KEY is set, but this server reads MINI_VLLM_API_KEY: it has no key." in server.text
        assert "secret" not in server.text


def test_a_unix_socket_is_served_and_its_file_is_gone_at_the_end_and_a_left_one_is_in_nobodys_way(tiny, tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with served("--model", tiny.folder, "--uds", path, "--root-path", "/llm") as server:
        assert server.address == str(path)
        assert f"curl -N --unix-socket {path} http://localhost/llm/v1/chat/completions" in server.text
        transport = httpx.HTTPTransport(uds=str(path))
        wait_until(lambda: answers("http://localhost/llm", transport=transport), "it answers")
        second = run("--uds", path, "--model", "/no/such/folder")
        assert second.stderr == f"error: Cannot listen on {path}: Address already in use. Choose another with --uds.\n"
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0, server.text
    assert not path.exists()


def test_https_is_served_with_a_certificate_and_its_key(tiny):
    files = ["--ssl-certfile", TLS / "localhost.crt.pem", "--ssl-keyfile", TLS / "localhost.key.pem"]
    with served("--model", tiny.folder, *files) as server:
        assert server.address == f"https://127.0.0.1:{server.port}"
        assert f"Documentation: {server.address}/docs" in server.text
        context = ssl.create_default_context(cafile=TLS / "localhost.crt.pem")
        wait_until(lambda: answers(server.address, verify=context), "it answers")


def test_a_chat_template_from_a_file_takes_the_models_place(tiny, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    with served("--model", tiny.folder, "--chat-template", template) as server:
        chat = {"messages": [{"role": "user", "content": "é"}]}
        tokens = httpx.post(f"{server.url}/tokenize", json=chat, trust_env=False, timeout=SECONDS).json()["tokens"]
        assert bytes(tokens).decode() == "<é>"


def test_the_models_sampling_is_said_at_the_start_and_holds_unless_it_is_switched_off(tiny, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder, folder)
    config = json.loads((folder / "generation_config.json").read_text()) if tiny_has_config(folder) else {}
    recommended = {"temperature": 0.0, "top_p": 0.9, "top_k": None, "do_sample": True, "max_new_tokens": 5}
    (folder / "generation_config.json").write_text(json.dumps(config | recommended))
    body = {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
    with served("--model", folder) as server:
        said = "\nWhere a request says nothing (generation_config.json): temperature 0, top_p 0.9, max_tokens 5\n"
        assert said in server.text
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, trust_env=False, timeout=SECONDS).json()
        assert answer["usage"]["completion_tokens"] == 5
    with served("--model", folder, "--generation-config", "vllm") as server:
        assert "Where a request" not in server.text


def tiny_has_config(folder: Path) -> bool:
    return (folder / "generation_config.json").is_file()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_waits_for_no_stream_and_for_no_half_request(endless, sig):
    with served("--model", endless, "--shutdown-timeout", 300) as server:
        half = half_request(server)
        stream = OpenStream(server.url, max_tokens=150_000)
        server.process.send_signal(sig)
        wait_until(lambda: server.refuses_connections, "the first one has been taken in")
        assert not stream.done
        server.process.send_signal(sig)
        assert server.end(20) == 0, server.text  # of the 300 that the first one gave
        wait_until(lambda: stream.done, "the stream has ended")
        half.close()


def test_a_port_that_is_taken_is_told_in_one_sentence_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("--port", port, "--model", "/no/such/folder")
    assert done.returncode == 1
    assert done.stderr == (
        f"error: Cannot listen on 127.0.0.1, port {port}: Address already in use. Choose others with --host and "
        "--port.\n"
    )


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--max-queued-requests", "0"], "max_queued_requests must be at least 1, got 0."),
        (["--api-key", ""], "api_key is empty: leave it out, or give a key (was a variable of the shell not set?)."),
        (["--served-model-name", " "], "served_model_name is empty: leave it out, or give a name."),
        (["--allowed-origins", "nonsense"], "allowed_origins must be a JSON list such as '[\"*\"]', got 'nonsense'."),
        (["--allowed-origins", "[1]"], "allowed_origins must be a JSON list such as '[\"*\"]', got '[1]'."),
        (["--port", "70000"], "port must be from 0 to 65535, got 70000."),
        (["--host", ""], "host is empty: leave it out for 127.0.0.1, or give 0.0.0.0 for every interface."),
        (["--api-key", "a key\n"], "api_key has blanks around it, or characters that no header can carry"),
        (["--served-model-name", "a\udcff"], "served_model_name is not printable text: 'a\\udcff'."),
        (["--port", "0", "--model", "a\udcff"], "The model's path is not printable text: 'a\\udcff'. Name it with"),
        (["--root-path", "llm"], "root_path must begin with a slash and end without, got 'llm'."),
        (["--root-path", "/llm/"], "root_path must begin with a slash and end without, got '/llm/'."),
        (["--ssl-keyfile", "x"], "ssl_keyfile needs ssl_certfile, the certificate that the key belongs to."),
        (["--ssl-certfile", "/none"], "ssl_certfile: there is no file /none."),
        (["--ssl-certfile", "README.md"], "ssl_certfile and ssl_keyfile cannot be used ("),
        (["--uds", "/none/socket"], "Cannot listen on /none/socket: No such file or directory."),
        (["--chat-template", "/none"], "chat_template: /none cannot be read: No such file or directory."),
        (["--max-body-size", "much"], "max_body_size"),
        (
            ["--port", "0", "--generation-config", "/none"],
            "generation_config: there is no /none/generation_config.json",
        ),
        (["--port", "-1"], "port must be from 0 to 65535, got -1."),
        (["--shutdown-timeout", "-1"], "shutdown_timeout must be at least 0 seconds, got -1.0."),
        (["--shutdown-timeout", "nan"], "shutdown_timeout must be at least 0 seconds, got nan."),
        (["--shutdown-timeout", "inf"], "shutdown_timeout must be at least 0 seconds, got inf."),
        (["--port", "0", "--model", "/no/such/folder"], "There is no folder /no/such/folder"),
        (["--port", "0", "--host", "256.256.256.256"], "Cannot listen on 256.256.256.256, port 0: "),
        (["--port", "0", "--host", "a..b"], "Cannot listen on a..b, port 0: "),
    ],
)
def test_a_wrong_flag_is_told_in_one_sentence(args, sentence):
    done = run(*args)
    assert (done.returncode, done.stdout) == (1, "")
    said = done.stderr.removeprefix("Loading the model...\n")
    assert said.startswith(f"error: {sentence}")
    assert said.count("\n") == 1


def test_unt_17_a_key_of_the_environment_that_no_header_can_carry_is_told_in_one_sentence():
    done = run("--port", "0", "--model", "/no/such/folder", environment={"MINI_VLLM_API_KEY": "two\nlines"})
    assert done.returncode == 1
    assert done.stderr.startswith("error: MINI_VLLM_API_KEY has blanks around it, or characters that no header")


def test_unt_60_a_pool_that_can_serve_nothing_is_refused_at_the_start(tiny):
    done = run("--port", "0", "--model", tiny.folder, "--num-blocks", "1", "--block-size", "1")
    assert done.returncode == 1
    assert done.stderr.endswith(
        "error: The KV cache holds one token, and no request is that short: give it more memory, or blocks.\n"
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{% for %}", "The chat template is no Jinja template: line 1: "),
        (b"\xff", "chat_template: {file} cannot be read: it is not UTF-8 text."),
    ],
)
def test_a_file_that_is_no_chat_template_is_told_in_one_sentence(tiny, tmp_path, content, says):
    file = tmp_path / "template"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    done = run("--port", "0", "--model", tiny.folder, "--chat-template", file)
    assert done.returncode == 1
    assert f"error: {says.format(file=file)}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"temperature": 9}', "temperature must be"),
        ('{"top_p": "much"}', "top_p must be"),
        ("[]", "it is not a JSON object."),
        ("{", "it is not a JSON object."),
    ],
)
def test_a_generation_config_that_cannot_hold_is_told_in_one_sentence(tiny, tmp_path, content, says):
    (tmp_path / "generation_config.json").write_text(content)
    done = run("--port", "0", "--model", tiny.folder, "--generation-config", tmp_path)
    assert done.returncode == 1
    assert f"error: {tmp_path}/generation_config.json: {says}" in done.stderr
    assert done.stderr.endswith("With --generation-config vllm it is not read.\n")


def test_help_names_every_flag_with_its_default_and_loads_nothing_heavy():
    code = f"""
import runpy, sys
sys.argv = ["v0_4_http", "--help"]
try:
    runpy.run_module("v0_4_http", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert end.code == 0
print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "[]\n"
    shown = " ".join(done.stdout.split())
    for words in (
        "--host STR",
        "--port INT",
        "--api-key STR",
        "--shutdown-timeout FLOAT",
        "--model STR",
        "--num-blocks",
    ):
        assert words in shown
    assert "(default: 8000)" in shown
    assert "(default: 1024)" in shown


@pytest.mark.parametrize("name", ["v0_4_http", "v0_4_http.server", "v0_4_http.server.server_args"])
def test_importing_the_package_or_its_server_loads_nothing_heavy(name):
    done = python(f"import sys, {name}; print([name for name in {HEAVY} if name in sys.modules])")
    assert (done.stdout, done.stderr) == ("[]\n", "")


def run(*args, environment=None):
    command = [sys.executable, "-m", "v0_4_http", *map(str, args)]
    environment = os.environ | (environment or {})
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)


def python(code):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
