"""Models that a milestone's kernels compute: contracts that take a ready model would run on PyTorch else."""

import copy
import gc
import importlib
from typing import Any

from .peak_memory import give_back_memory


def on_kernels(milestone: str, reference: Any) -> Any:
    """The same `Reference`, whose `ready` model is this milestone's; the other one's, which takes memory, is freed."""
    bindings, loader, engine_args = (
        importlib.import_module(f"{milestone}.{name}") for name in ("kernels.bindings", "loader", "engine_args")
    )
    reference.__dict__.pop("ready", None)
    reference.llms.clear()
    gc.collect()
    give_back_memory()
    own = copy.copy(reference)
    own.llms = {}
    args = engine_args.EngineArgs()
    if not isinstance(bindings.load(), str):
        args = engine_args.EngineArgs(linear_backend="c")  # to be repeatable
    model, tokenizer = loader.load(reference.folder, None, args)
    own.__dict__["ready"] = {"model": model, "tokenizer": tokenizer}
    return own
