"""Several replicas as their operator meets them: a command, its banner, its log, a signal, and nothing left then."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.kit.server import wait_until
from tests.v0_4.test_server_process import OpenStream, Server
from tests.v0_10.ray_kit import descendants, needs_ray

pytestmark = needs_ray


def test_it_says_what_it_serves_ends_its_streams_at_a_signal_and_leaves_nothing(tiny):
    arguments = ["--replicas", 2, "--model", tiny.folder, "--routing-threshold", 0, "--shutdown-timeout", 60]
    server = Server(*arguments, "--allow-control", module="v0_10_scale_out")
    try:
        assert f"{tiny.folder} on 2 replicas, 1 core and 0 GPUs each; routing: prefix\n" in server.text
        assert f"All replicas side by side: {server.url}/visualizer." in server.text
        processes = descendants(server.process.pid)
        assert len(processes) > 5
        control = httpx.post(f"{server.url}/events/control", json={"delay": 0.02}, trust_env=False)
        assert control.status_code == 200
        streams = [OpenStream(server.url, prompt=f"{i}", max_tokens=100) for i in range(4)]
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: is_refused(server.url), "nothing new is taken")
        assert server.end() == 0, server.text
        for stream in streams:
            wait_until(lambda stream=stream: stream.done, "the stream has ended")
            assert stream.error is None
            assert stream.bodies[-1]["choices"][0]["finish_reason"] == "length"
        assert server.refuses_connections
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), "no process is left", 20)
        assert len(re.findall(r"server\.access: POST /v1/completions 200 .* finish=length", server.text)) == 4
        assert len(re.findall(r"cluster\.routed: POST /v1/completions 200 .* rule=new", server.text)) == 4
        assert "Traceback" not in server.text
        assert "CALL asgi" not in server.text  # Ray's own access log
    finally:
        server.process.kill()
        server.end()
        server.process.stdout.close()


def is_refused(url):
    """By the ingress while it drains, and then by nobody being there."""
    try:
        return httpx.get(f"{url}/health", trust_env=False, timeout=5).status_code == 503
    except httpx.TransportError:
        return True


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--uds", "/tmp/x"], "uds: Ray's proxy listens on a port only"),
        (["--max-replicas", "1"], "max_replicas must be at least replicas (2), got 1."),
    ],
)
def test_what_cannot_work_is_said_before_ray_is_started(arguments, said):
    command = [sys.executable, "-m", "v0_10_scale_out", "--replicas", "2", "--port", "0", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") <= 3
