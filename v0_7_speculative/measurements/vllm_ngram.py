"""vLLM and its own n-gram drafter on the same workloads, in an environment of its own, beside ours.

This file is also what runs there: it imports the standard library alone at its top, and of us nothing.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .experiment import Engines

NUM_DRAFTS = 8
NGRAM_MIN, NGRAM_MAX = 2, 4
PLAIN, NGRAM = "plain", "ngram"
COMPARED = ("edit", "copy")  # of the workloads


def measure_vllm(engines: "Engines", venv: Path, max_tokens: int, repeats: int) -> dict[str, Any]:
    """Speed-up of each engine over its own plain decoding, and of ours over vLLM's: whole requests, prompt included."""
    from tqdm import tqdm

    from common.measuring.child import Child
    from common.measuring.recipe import spread

    from .experiment import answer

    num_threads = os.cpu_count() or 1
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}",
        "OMP_NUM_THREADS": str(num_threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    python = venv.absolute() / "bin" / "python"
    command = [str(python), "-c", Path(__file__).read_text()]
    ours = {PLAIN: engines.make(), NGRAM: engines.make("ngram", NUM_DRAFTS)}
    prompts = {name: engines.prompt(name) for name in COMPARED}
    seconds: dict[str, dict[str, list[float]]] = {
        name: {f"{who}_{way}": [] for who in ("vllm", "ours") for way in ours} for name in COMPARED
    }
    same = dict.fromkeys(COMPARED, True)
    with (
        Child("vLLM", command, environment=environment, cwd=python.parent) as plain,
        Child("vLLM with n-grams", command, environment=environment, cwd=python.parent) as ngram,
    ):
        children = {PLAIN: plain, NGRAM: ngram}
        versions = {way: child.ask({"folder": str(engines.folder), "way": way}) for way, child in children.items()}
        for repeat in tqdm(range(repeats + 1), desc="vLLM", unit="round"):
            for name in COMPARED:
                tokens = {}
                for way in (PLAIN, NGRAM) if repeat % 2 else (NGRAM, PLAIN):
                    num_tokens = max_tokens if repeat else 8
                    its = children[way].ask({"prompt": prompts[name], "num_tokens": num_tokens})
                    run = answer(ours[way], prompts[name], num_tokens)
                    tokens[way] = its["token_ids"]
                    if repeat:
                        seconds[name][f"vllm_{way}"].append(its["seconds"])
                        seconds[name][f"ours_{way}"].append(run.seconds)
                same[name] &= tokens[PLAIN] == tokens[NGRAM]

    def ratios(name: str, slow: str, fast: str) -> dict[str, float]:
        return spread([a / b for a, b in zip(seconds[name][slow], seconds[name][fast], strict=True)])

    return {
        "what": f"whole requests, {NUM_DRAFTS} drafts, n-grams of {NGRAM_MIN} to {NGRAM_MAX}",
        "versions": versions[PLAIN],
        "workloads": {
            name: {
                "seconds": {way: spread(values) for way, values in seconds[name].items()},
                "vllm_speed_up": ratios(name, "vllm_plain", "vllm_ngram"),
                "our_speed_up": ratios(name, "ours_plain", "ours_ngram"),
                "ours_over_vllm_plain": ratios(name, "vllm_plain", "ours_plain"),
                "ours_over_vllm_ngram": ratios(name, "vllm_ngram", "ours_ngram"),
                "vllm_same_answer": same[name],
            }
            for name in COMPARED
        },
    }


def _serve() -> None:
    """In vLLM's environment: the first line says which engine, every other one is a request."""
    import importlib
    import importlib.metadata

    vllm = importlib.import_module("vllm")  # not an import: nothing of this project depends on it

    first = json.loads(sys.stdin.readline())
    speculation = {
        "method": "ngram",
        "num_speculative_tokens": NUM_DRAFTS,
        "prompt_lookup_min": NGRAM_MIN,
        "prompt_lookup_max": NGRAM_MAX,
    }
    llm = vllm.LLM(
        model=first["folder"],
        dtype="float32",
        max_model_len=1024,
        enable_prefix_caching=False,
        speculative_config=speculation if first["way"] == NGRAM else None,
    )
    versions = {name: importlib.metadata.version(name) for name in ("vllm", "torch")}
    print("RESULT", json.dumps(versions), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        params = vllm.SamplingParams(temperature=0.0, max_tokens=job["num_tokens"])
        start = time.perf_counter()
        [output] = llm.generate([{"prompt_token_ids": job["prompt"]}], params, use_tqdm=False)
        result = {"seconds": time.perf_counter() - start, "token_ids": list(output.outputs[0].token_ids)}
        print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    _serve()
