"""Where to compute, and in which numbers. Changes in no milestone."""

import torch

from common.errors import ModelError


def select_device(name: str) -> torch.device:
    """`auto` is CUDA where there is a GPU, else the CPU; raises `ModelError` for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ModelError(f"There is no device {name!r}: choose auto, cpu or cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("This PyTorch finds no CUDA device: use --device cpu, or install a CUDA build of torch.")
    return torch.device(name)


def select_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on a CPU, which computes it fastest, and bfloat16 on CUDA.

    Not float16: a checkpoint trained in bfloat16 has activations beyond float16's 65,504, which become infinite and
    garble the text. bfloat16 has float32's range.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise ModelError(f"There is no dtype {name!r}: choose auto, {', '.join(dtypes)}.")
    return dtypes[name]
