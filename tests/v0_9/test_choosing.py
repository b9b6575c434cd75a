"""Which product computes how many rows: by a clock that the test sets, and kept in the cache."""

import itertools
import json
import math

import pytest
import torch

from v0_9_fast import choosing


@pytest.mark.parametrize(
    ("slower", "most_rows"),
    [
        ([False, False, False, False], math.inf),
        ([True, True, True, True], 0),
        ([False, False, True, True], 4),
        ([False, True, False, True], 16),  # all up to the last number of rows for which ours is not slower
        ([True, True, True, False], math.inf),
    ],
)
def test_ours_computes_all_rows_up_to_the_last_for_which_it_is_not_slower(slower, most_rows):
    assert choosing.chosen(slower) == most_rows


@pytest.mark.parametrize(
    ("theirs", "most_rows"),
    [(1.0, math.inf), (1 / 1.04, math.inf), (1 / 1.1, 0), (2.0, math.inf)],
)
def test_onednn_has_to_be_clearly_faster(kernels, monkeypatch, tmp_path, theirs, most_rows):
    """Ours takes 1 second by this clock, and oneDNN's `theirs`: the clock is read at the start, between, and after."""
    monkeypatch.setenv("MINI_VLLM_CACHE", str(tmp_path))
    ticks = itertools.accumulate(itertools.cycle([0.0, 1.0, theirs]))
    monkeypatch.setattr(choosing.time, "perf_counter", lambda: next(ticks))
    assert choosing.most_rows(kernels, [torch.randn(48, 16)] * 3) == most_rows


def test_what_was_found_is_asked_for_once_for_each_shape_and_a_broken_file_is_no_fault(kernels, monkeypatch, tmp_path):
    monkeypatch.setenv("MINI_VLLM_CACHE", str(tmp_path))
    asked = []
    monkeypatch.setattr(choosing, "measured", lambda _, weights: asked.append(weights[0].shape) or 16)
    for weight in (torch.randn(48, 16), torch.randn(48, 16), torch.randn(16, 48)):
        assert choosing.most_rows(kernels, [weight]) == 16
    assert asked == [(48, 16), (16, 48)]
    files = sorted(tmp_path.glob("product-*.json"))
    assert [json.loads(file.read_text())["most_rows"] for file in files] == [16, 16]
    for file in files:
        file.write_text("{")
    assert choosing.most_rows(kernels, [torch.randn(48, 16)]) == 16
    assert asked == [(48, 16), (16, 48), (48, 16)]


def test_a_cache_that_cannot_be_written_is_no_fault(kernels, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINI_VLLM_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(choosing, "measured", lambda *_: math.inf)
    assert choosing.most_rows(kernels, [torch.randn(4, 4)]) == math.inf


def test_the_measurement_itself_runs_on_real_matrices(kernels, monkeypatch, tmp_path):
    monkeypatch.setenv("MINI_VLLM_CACHE", str(tmp_path))
    assert choosing.most_rows(kernels, [torch.randn(100, 36)] * 2) in (0, *choosing.NUM_ROWS, math.inf)
