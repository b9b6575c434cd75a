"""Where on the disk this project keeps what it makes once: converted models, compiled kernels. Torch-free."""

import os
from pathlib import Path

from common.errors import ModelError


def cache_directory() -> Path:
    """`$MINI_VLLM_CACHE`, `$XDG_CACHE_HOME/mini-vllm` or `~/.cache/mini-vllm`, whether it is there or not.

    Raises:
        ModelError: there is no home directory to have a cache in.
    """
    # Set to nothing is the same as not set, as the XDG specification has it.
    own, shared = os.environ.get("MINI_VLLM_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(own).expanduser() if own else Path(shared or "~/.cache").expanduser() / "mini-vllm"
    except RuntimeError as error:  # a user without a home directory, as in some containers
        raise ModelError(f"There is no cache directory ({error}): set MINI_VLLM_CACHE to one.") from error
