"""What it costs to score a prompt: `python -m v0_4_http.measurements.scoring`.

One long prompt, computed with `prompt_logprobs` and without, in turns. The figures go to `scoring.json` with their
recipe; v0.4's page quotes that file. Dropped in v0.5.
"""

import argparse
import json
import random
import time
from pathlib import Path

from common.measuring.recipe import recipe, spread

from .. import LLM, SamplingParams

RESULTS = Path(__file__).with_suffix(".json")
NUM_TOKENS, SEED = 2000, 0


def main() -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: the file that the documents quote")
    args = parser.parse_args()
    settings = recipe(dtype="float32", seed=SEED, num_tokens=NUM_TOKENS, repeats=args.repeats)
    llm, rng = LLM(), random.Random(SEED)
    milliseconds: dict[str, list[float]] = {"plain": [], "scored": []}
    for repeat in range(-1, args.repeats):  # the first one warms up
        prompt = [rng.randrange(100, 40000) for _ in range(NUM_TOKENS)]
        for name, num in (("plain", None), ("scored", 1)):
            start = time.perf_counter()
            llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=num), use_tqdm=False)
            if repeat >= 0:
                milliseconds[name].append((time.perf_counter() - start) * 1e3)
    ratios = [scored / plain for plain, scored in zip(milliseconds["plain"], milliseconds["scored"], strict=True)]
    results = {"recipe": settings, "ratio": spread(ratios)}
    results |= {name: spread(values) for name, values in milliseconds.items()}
    print(json.dumps(results, indent=1))
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
