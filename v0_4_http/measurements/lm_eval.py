"""Is the engine as good as transformers? `python -m v0_4_http.measurements.lm_eval --lm-eval PATH/TO/lm_eval`.

EleutherAI's lm-evaluation-harness asks this server, over its `local-completions`, and the same weights in transformers,
its own `hf`, both in float32. Two tasks, made here: 60 questions with four answers each, of which the likeliest counts
as given, and the perplexity of two texts of this repository. Both need the log-probabilities of prompts.

`--lm-eval` is the command of an environment of its own (`pip install 'lm-eval[api,hf]' torch`, transformers 5);
no hub is asked. The figures go to `lm_eval.json` with their recipe; v0.4's page quotes that file. Dropped in v0.5.
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from common.measuring.recipe import ROOT, recipe
from common.weights import resolve

RESULTS = Path(__file__).with_suffix(".json")
NAME = "SmolLM2-135M-Instruct"
SEED = 0
NUM_QUESTIONS = 20  # of each of three kinds
WINDOW = 1024  # tokens: what a text's token is judged by begins at most so far before it
TEXTS = {"LICENSE": 12000, "CONTRIBUTING.md": 4000}  # file -> its first characters

CAPITALS = {
    "Austria": "Vienna", "Belgium": "Brussels", "Canada": "Ottawa", "China": "Beijing", "Cuba": "Havana",
    "Egypt": "Cairo", "France": "Paris", "Germany": "Berlin", "Greece": "Athens", "India": "New Delhi",
    "Iran": "Tehran", "Ireland": "Dublin", "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi",
    "Norway": "Oslo", "Peru": "Lima", "Poland": "Warsaw", "Portugal": "Lisbon", "Russia": "Moscow",
    "Spain": "Madrid", "Sweden": "Stockholm", "Thailand": "Bangkok", "Turkey": "Ankara",
}  # fmt: skip
ANIMALS = (
    "cow", "dog", "cat", "horse", "tiger", "rabbit", "eagle", "shark", "monkey", "spider",
    "sheep", "goat", "lion", "wolf", "duck", "frog", "snake", "whale", "mouse", "bear",
)  # fmt: skip
THINGS = (
    "table", "river", "hammer", "cloud", "bread", "window", "pencil", "mountain", "shirt", "bottle",
    "road", "paper", "violin", "island", "candle", "bridge", "button", "engine", "ladder", "mirror",
)  # fmt: skip

CHOICES = """task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choices.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
TEXT = """task: texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/texts.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
"""


def main() -> None:
    """Ask both, print what they say, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lm-eval", required=True, help="the harness's command, of an environment of its own")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: the file that the documents quote")
    args = parser.parse_args()
    model = resolve(None)
    settings = recipe(model=NAME, dtype="float32", seed=SEED, window=WINDOW, lm_eval=_version(args.lm_eval))
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder))
        port = _free_port()
        with open(Path(folder) / "server.log", "w") as log:
            server = subprocess.Popen([sys.executable, "-m", "v0_4_http", "--port", str(port)], stderr=log)
        try:
            _wait(server, f"http://127.0.0.1:{port}/health")
            # Its window is two shorter than its max_length: one token of context, one that is generated.
            ours = run(
                args.lm_eval,
                Path(folder),
                "local-completions",
                f"model={NAME},base_url=http://127.0.0.1:{port}/v1/completions,tokenizer={model},"
                f"num_concurrent=8,max_length={WINDOW + 2}",
            )
        finally:
            server.terminate()
            server.wait()
        hf = run(args.lm_eval, Path(folder), "hf", f"pretrained={model},dtype=float32,max_length={WINDOW}")
    results = {"recipe": settings, "ours": ours["metrics"], "hf": hf["metrics"], "differences": compare(ours, hf)}
    print(json.dumps(results, indent=1))
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {args.out}")


def write_tasks(folder: Path) -> None:
    """Two tasks as the harness reads them: a YAML file, and JSON lines."""
    texts = [{"text": (ROOT / name).read_text()[:length]} for name, length in TEXTS.items()]
    for name, yaml, rows in (("choices", CHOICES, questions()), ("texts", TEXT, texts)):
        (folder / f"{name}.yaml").write_text(yaml.format(folder=folder))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def questions() -> list[dict[str, Any]]:
    """The same sixty each time: sums, capitals, and which of four words is an animal."""
    rng = random.Random(SEED)
    rows = []

    def add(question: str, right: str, wrong: list[str]) -> None:
        choices = [right, *wrong]
        rng.shuffle(choices)
        rows.append({"question": question, "choices": choices, "gold": choices.index(right)})

    for country in rng.sample(sorted(CAPITALS), NUM_QUESTIONS):
        others = rng.sample(sorted(set(CAPITALS.values()) - {CAPITALS[country]}), 3)
        add(f"Question: What is the capital of {country}?\nAnswer:", CAPITALS[country], others)
    for _ in range(NUM_QUESTIONS):
        a, b = rng.randint(2, 49), rng.randint(2, 49)
        wrong = rng.sample([a + b + d for d in (-10, -3, -2, -1, 1, 2, 3, 10) if a + b + d > 0], 3)
        add(f"Question: What is {a} plus {b}?\nAnswer:", str(a + b), [str(number) for number in wrong])
    for animal in rng.sample(ANIMALS, NUM_QUESTIONS):
        add("Question: Which of these is an animal?\nAnswer: It is the", animal, rng.sample(THINGS, 3))
    return rows


def run(command: str, folder: Path, kind: str, model_args: str) -> dict[str, Any]:
    """One run of the harness: its metrics, and the log-likelihood of everything that it asked about."""
    out = folder / kind
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    words = [
        *(command, "--model", kind, "--model_args", model_args, "--tasks", "choices,texts"),
        *("--include_path", str(folder), "--output_path", str(out), "--log_samples", "--batch_size", "1"),
        *("--device", "cpu"),
    ]
    print(" ".join(words[:5]), flush=True)
    subprocess.run(words, check=True, env=os.environ | offline)
    [file] = out.rglob("results_*.json")
    metrics = {}
    for values in json.loads(file.read_text())["results"].values():
        for key, value in values.items():
            name, _, kind_of_filter = key.partition(",")
            if kind_of_filter and not name.endswith("_stderr"):
                metrics[name] = value
    samples: dict[str, list[float]] = {}
    for name in ("choices", "texts"):
        [file] = out.rglob(f"samples_{name}_*.jsonl")
        rows = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: row["doc_id"])
        samples[name] = [float(_number(answer[0])) for row in rows for answer in row["resps"]]
    return {"metrics": metrics, "samples": samples}


def compare(ours: dict[str, Any], hf: dict[str, Any]) -> dict[str, Any]:
    """The largest difference between two log-likelihoods of the same answer, and the relative one of two texts."""
    pairs = {name: list(zip(ours["samples"][name], hf["samples"][name], strict=True)) for name in ("choices", "texts")}
    return {
        "num_answers": len(pairs["choices"]),
        "largest_of_answers": max(abs(a - b) for a, b in pairs["choices"]),
        "largest_of_texts_relative": max(abs(a / b - 1) for a, b in pairs["texts"]),
        "metrics": {name: abs(ours["metrics"][name] - value) for name, value in hf["metrics"].items()},
    }


def _number(value: Any) -> Any:
    """The log-likelihood, of a pair with `is_greedy` or alone, as deep as the harness's version puts it."""
    while isinstance(value, list):
        value = value[0]
    return value


def _version(command: str) -> str:
    python = Path(command).parent / "python"
    code = (
        "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in ('lm_eval', 'transformers', 'torch')))"
    )
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(server: subprocess.Popen[bytes], url: str) -> None:
    while server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
        else:
            return
    raise RuntimeError(f"the server has ended with exit code {server.returncode}")


if __name__ == "__main__":
    main()
