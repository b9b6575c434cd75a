"""Everything that needs a GPU, in one command: `python -m v0_5_bench.harness.gpu --out gpu.json`.

It runs from the checkout's root with torch, transformers and numpy alone, and ends within `--limit` seconds. Its parts
run one after the other, each in a process of its own with a limit of its own, so that none can spoil the others, and
the file is written anew after each item:

    machine        what the card reaches: GB/s, TFLOP/s                     card.py
    correctness    a small random Llama against transformers, in float32    correctness.py
    serving        tokens/s and time to first token of an 8B Llama          serving.py
    expected       what the card's own rates allow, beside what was reached
    transformers   its `generate` on the same shape                         serving.py

Correctness and serving are those of v0.5. They come again for v0.9, with its kernels and CUDA graphs
(correctness-v0_9 ...) and on PyTorch alone (correctness-v0_9-torch ...). With `--device cpu` the same is done in about
a minute, on a tiny shape.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.measuring.recipe import recipe

ITEM = '{"item": '  # begins a line of results among whatever else a part prints
ENGINES = ("v0_5", "v0_9", "v0_9-torch")  # as in `compare/peers.py`
OF_ENGINES = {"correctness": 120, "serving": 200}  # seconds
LIMITS = {
    "machine": 60,
    **OF_ENGINES,
    **{f"{part}-{engine}": limit for engine in ENGINES[1:] for part, limit in OF_ENGINES.items()},
    "transformers": 90,
}
LEAST = 15  # seconds: with less there is no time to load anything

Json = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Run all parts; returns 0 if none failed."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="default: gpu.json")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", help="a bundled shape (default: llama-3.1-8b, on a CPU tiny)")
    parser.add_argument("--model", help="a folder or hub id, for real weights in place of a shape with random ones")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=570, help="seconds for everything together (default: 570)")
    parser.add_argument("--only", nargs="+", choices=tuple(LIMITS), help="these parts alone")
    parser.add_argument("--part", choices=tuple(LIMITS), help=argparse.SUPPRESS)  # a process that does this one
    args = parser.parse_args(argv)
    args.shape = args.shape or ("tiny" if args.device == "cpu" else "llama-3.1-8b")
    if args.part:
        return _do_part(args)
    end = time.monotonic() + args.limit
    settings = {name: getattr(args, name) for name in ("device", "shape", "model", "repeats")}
    results: Json = {"recipe": recipe(**settings | {"seed": 0, "warm_up": 1}), "parts": {}}
    for name, limit in LIMITS.items():
        if args.only is None or name in args.only:
            results["parts"][name] = part = {"status": "running", "items": {}}
            _run_part(args, name, min(limit, end - time.monotonic()), part, lambda: _write(args.out, results))
            _write(args.out, results)
        if name.startswith("serving"):
            results["parts"][name.replace("serving", "expected")] = _expected(results["parts"], name)
    _write(args.out, results)
    print("\n".join(summary(results)))
    print(f"written to {args.out}", file=sys.stderr)
    return int(any(part["status"] in ("failed", "timed out") for part in results["parts"].values()))


def _write(file: Path, results: Json) -> None:
    file.write_text(json.dumps(results, indent=1) + "\n")


def _do_part(args: argparse.Namespace) -> int:
    """Within the part's own process."""
    from .card import Settings, machine, report
    from .correctness import correctness
    from .serving import serving, transformers

    parts: dict[str, Callable[[Settings], None]] = {
        "machine": machine,
        "correctness": correctness,
        "serving": serving,
        "transformers": transformers,
    }
    part, _, engine = args.part.partition("-")
    settings = Settings(
        engine=engine or ENGINES[0], device=args.device, shape=args.shape, model=args.model, repeats=args.repeats
    )
    report("whole", parts[part], settings)
    return 0


def _run_part(args: argparse.Namespace, name: str, limit: float, part: Json, write: Callable[[], None]) -> None:
    """Run a part in a process of its own, and take in its items as they come; `limit` is in seconds."""
    if limit < LEAST:
        part["status"] = "skipped"
        return
    command = [sys.executable, "-m", __package__ or "", "--part", name]
    for option in ("device", "shape", "model", "repeats"):
        if getattr(args, option) is not None:
            command += [f"--{option}", str(getattr(args, option))]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        timer = threading.Timer(limit, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(ITEM):
                    item = json.loads(line)
                    part["items"][item.pop("item")] = item
                    print(f"{name:23}{line.strip():.160}", flush=True)
                    write()
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
        part["seconds"] = round(time.monotonic() - start, 3)
        if code < 0 and part["seconds"] >= limit:
            part["status"] = "timed out"
        else:
            failed = code or any("error" in item for item in part["items"].values())
            part["status"] = "failed" if failed else "passed"
        if part["status"] != "passed":
            stderr.seek(0)
            part["stderr"] = stderr.read()[-4000:]


def _expected(parts: Json, serving: str) -> Json:
    try:
        return {"status": "passed", "items": expectations(parts["machine"]["items"], parts[serving]["items"])}
    except KeyError as error:  # what was not measured, or not asked for
        return {"status": "skipped", "items": {}, "why": f"there is no {error}"}
    except Exception as error:
        return {"status": "failed", "items": {}, "error": str(error), "traceback": traceback.format_exc()}


def expectations(machine: Json, serving: Json) -> Json:
    """What the card's own rates allow, and what share of that was reached: 1 would be all of it.

    A step of `R` decodes reads all matrices and everybody's KV, and multiplies each matrix by `R` rows: it takes at
    least the larger of bytes / bandwidth and FLOP / rate. A prompt takes at least 2 FLOP per element of the layers'
    matrices and token, or the reading of them; the head is computed for one token. Attention's own FLOP are left out:
    in an 8B Llama a tenth of the whole at 4,000 tokens.
    """
    bandwidth = 1e9 * max(machine[name]["result"]["median"] for name in ("copy_gb_s", "read_gb_s"))
    load = serving["load"]["result"]
    rate = 1e12 * machine[f"{load['dtype']}_tflop_s"]["result"]["median"]
    size, layers, head = load["bytes_per_element"], load["layer_elements"], load["head_elements"]
    items: Json = {"basis": {"bandwidth_gb_s": bandwidth / 1e9, "matrix_rate_tflop_s": rate / 1e12}}
    for name, item in serving.items():
        kind, _, rest = name.partition("_")
        if kind not in ("decode", "prefill") or "error" in item:
            continue
        result, num = item["result"], int(rest.split("_")[0])
        if kind == "decode":
            context = result["prompt_len"] + (result["num_new_tokens"] + 1) / 2  # in the middle of the answer
            num_bytes = size * (layers + head + num * context * load["kv_elements_per_token"])
            best = num / max(num_bytes / bandwidth, 2 * (layers + head) * num / rate)
            reached = result["decode_tokens_per_s"]["median"]
            items[name] = {"best_tokens_per_s": best, "tokens_per_s": reached, "share": reached / best}
        else:
            best = 1e3 * max(2 * layers * num / rate, size * layers / bandwidth)
            reached = result["ttft_ms"]["median"]
            items[name] = {"best_ttft_ms": best, "ttft_ms": reached, "share": best / reached}
    return items


def summary(results: Json) -> list[str]:
    """What a person wants to know first, a line each."""
    lines = [""]
    for name, part in results["parts"].items():
        lines.append(f"{name:24}{part['status']:10}{part.get('seconds', 0):7.1f} s")
        for item, entry in part["items"].items():
            if "error" in entry:
                lines.append(f"    {item}: {entry['error']}")
    items = {name: part["items"] for name, part in results["parts"].items()}
    if versions := items.get("machine", {}).get("versions", {}).get("result"):
        lines += ["", ", ".join(f"{name} {value}" for name, value in versions.items())]
    for name in (name for name in items if name.startswith("expected")):
        lines += ["", name.replace("expected", "serving")]
        for item, value in items[name].items():
            if item != "basis":
                best, reached, share = value.values()
                unit = "tokens/s" if "tokens_per_s" in value else "ms to the first token"
                lines.append(f"{item:24}{reached:12,.1f} {unit}, at best {best:,.1f}: {share:.1%}")
    for name in (name for name in items if name.startswith(("serving", "transformers"))):
        lines.append("")
        for item, entry in items[name].items():
            if rates := (entry.get("result") or {}).get("output_tokens_per_s"):
                lines.append(f"{name} {item:15}{rates['median']:12,.1f} output tokens/s, prompts included")
            if parts := (entry.get("result") or {}).get("parts_ms"):
                split = ", ".join(f"{part} {ms:.2f}" for part, ms in parts.items())
                lines.append(f"{name} {item}, ms of a step: {split}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
