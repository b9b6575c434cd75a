"""`make visualize`: a server with a load, whose page is there while it runs; Ctrl-C or SIGTERM ends both."""

import re
import signal
import subprocess
import sys

import httpx

from tests.conftest import ROOT


def test_the_page_is_there_while_questions_are_answered_and_a_signal_ends_it_all(tiny):
    flags = ["--port", "0", "--num-requests", "2", "--model", str(tiny.folder), "--num-blocks", "100"]
    command = [sys.executable, "-m", "tools.visualize", *flags]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = ""
            while not (found := re.search(r"Watch it: (http://\S+)/visualizer", said)):
                said += (line := process.stderr.readline())
                assert line, f"it has ended: {said}"
            page = httpx.get(f"{found[1]}/visualizer/", trust_env=False)
            assert (page.status_code, "mini-vLLM" in page.text) == (200, True)
            while "All questions are asked" not in said:
                said += process.stderr.readline()
            process.send_signal(signal.SIGTERM)  # not SIGINT, which a shell lets its background jobs ignore
            rest = process.communicate(timeout=60)[1]
            assert "The server has ended with exit code 0." in rest
            assert process.returncode == 0
        finally:
            process.kill()
