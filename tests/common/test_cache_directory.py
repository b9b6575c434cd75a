"""Where the cache is, from the environment."""

from pathlib import Path

import pytest

from common.cache_directory import cache_directory
from common.errors import ModelError


def test_the_cache_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MINI_VLLM_CACHE", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory() == tmp_path / ".cache/mini-vllm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg/mini-vllm"
    monkeypatch.setenv("MINI_VLLM_CACHE", "~/own")
    assert cache_directory() == tmp_path / "own"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    for name in ("MINI_VLLM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ModelError, match=r"Could not determine home directory.*set MINI_VLLM_CACHE to one"):
        cache_directory()
