"""The run's own account of its memory (`tests.kit.peak_memory`), seen from small runs of pytest."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def run(tmp_path):
    """`run(limit, flags)`: exit code, output, and the bytes that were counted, of a run of two tests that pass."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_two.py").write_text("def test_one():\n    pass\n\n\ndef test_two():\n    pass\n")

    def call(limit, *flags):
        code = f"""
import sys, pytest
from tests.kit import peak_memory
peak_memory.LIMIT = {limit}
flags = ["-p", "tests.kit.peak_memory", "-p", "no:cacheprovider", *{list(flags)!r}]
code = pytest.main([*flags, {str(tmp_path)!r}])
print("bytes:", peak_memory.peak_bytes())
sys.exit(code)
"""
        environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert "2 passed" in done.stdout, done.stdout + done.stderr
        return done.returncode, done.stdout, int(re.search(r"bytes: (\d+)", done.stdout)[1])

    return call


def test_a_run_says_what_it_took_at_its_peak(run):
    code, text, _ = run(10**12)
    assert code == 0
    assert re.search(r"^peak memory: \d+\.\d GB$", text, re.MULTILINE)


def test_a_run_that_took_more_than_the_limit_fails_though_every_test_passed(run):
    code, text, _ = run(10**6)
    assert code == 1
    assert ", above the limit of 0.001 GB: the run has failed\n" in text


def test_workers_are_added_to_the_process_that_leads_them(run):
    pytest.importorskip("xdist")
    _, _, alone = run(10**12)
    workers = ["-p", "xdist", "-n", "2"]
    _, _, together = run(10**12, *workers)
    assert together > 2.5 * alone
    code, text, _ = run(2 * alone, *workers)
    assert code == 1
    assert "above the limit" in text
