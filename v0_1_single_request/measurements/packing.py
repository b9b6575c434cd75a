"""Whether packed matrices pay on this processor: `python -m v0_1_single_request.measurements.packing`.

All products of a step on plain and on packed matrices, and beside them, in the same rounds, what it takes to read the
weights and do next to nothing with them. `decode.py` has the plain and the packed products of another machine, which
they differ from. The figures go to `packing.json` with their recipe; the pages quote that file. Dropped in v0.2, which
measures something else.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common.config import ModelConfig
from common.llama import linear, pack
from common.measuring.recipe import recipe
from common.weights import load_weights, resolve

from .decode import _time_all

ROWS = (1, 36)  # a decode step, and the demo's prompt
RESULTS = Path(__file__).with_suffix(".json")


def main() -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: the file that the documents quote")
    args = parser.parse_args()
    folder = resolve(None)
    results = {
        "recipe": recipe(
            model=folder.name.rpartition("-")[0], dtype="float32", threads=torch.get_num_threads(), repeats=args.repeats
        ),
        "packing": measure_packing(folder, args.repeats),
    }
    print(json.dumps(results, indent=1))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {args.out}")
    if args.out == RESULTS:
        print("the documents quote this file: python -m tools.figures --write takes the new figures over")


@torch.inference_mode()
def measure_packing(folder: Path, repeats: int) -> dict[str, Any]:
    """Milliseconds of all products of a step, by rows, plain and packed; and of adding up all their weights."""
    config = ModelConfig.from_folder(folder)
    names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")
    weights = load_weights(folder, config, torch.device("cpu"), torch.float32)
    plain = [tensor for name, tensor in weights.items() if name.endswith(names)]
    packed = [pack(matrix) for matrix in plain]
    numbers = torch.rand(sum(matrix.numel() for matrix in plain))

    def step(matrices: list[torch.Tensor], rows: int) -> Callable[[], Any]:
        inputs = {width: torch.randn(rows, width) for width in {matrix.shape[1] for matrix in matrices}}
        return lambda: [linear(inputs[matrix.shape[1]], matrix) for matrix in matrices]

    functions: dict[str, Callable[[], Any]] = {"read": numbers.sum}
    for rows in ROWS:
        functions |= {f"plain_{rows}": step(plain, rows), f"packed_{rows}": step(packed, rows)}
    return {
        "what": "ms for all linear layers of one step, by rows, and for adding up as many numbers as they have weights",
        **_time_all(functions, repeats, calls=3),
    }


if __name__ == "__main__":
    main()
