"""`vllm bench serve`: vLLM's own load generator, from the environment of a real vLLM."""

import json
import statistics
import tempfile
from pathlib import Path

from scenario import Server, equal, main, positive, program, works

NUM, OUTPUT_LEN = 8, 16


def bench(server: Server, backend: str, endpoint: str) -> list[list[float]]:
    """Load the server; the gaps between what it takes for tokens, of each request."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "backend": backend,
            "base-url": server.url,
            "endpoint": endpoint,
            "model": server.model,
            "tokenizer": server.folder,
            "dataset-name": "random",
            "random-input-len": 30,
            "random-output-len": OUTPUT_LEN,
            "num-prompts": NUM,
            "max-concurrency": 2,
            "temperature": 0,
            "result-dir": folder,
            "result-filename": "result.json",
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        program("vllm", "bench", "serve", "--ignore-eos", "--save-result", "--save-detailed", *words, cwd=folder)
        found = json.loads((Path(folder) / "result.json").read_text())
    equal(found["completed"], NUM, "completed requests")
    equal(found["total_output_tokens"], NUM * OUTPUT_LEN, "tokens generated")
    equal(found["output_lens"], [OUTPUT_LEN] * NUM, "tokens of each answer")
    for figure in ("mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms"):
        positive(found[figure], figure)
    return found["itls"]


@works("8 completions: counts, TTFT, TPOT, a gap between any two tokens", "`--backend openai --ignore-eos`")
def completions(server: Server) -> None:
    gaps = bench(server, "openai", "/v1/completions")
    equal([len(each) for each in gaps], [OUTPUT_LEN - 1] * NUM, "gaps between tokens")
    positive(min(map(statistics.median, gaps)), "the median gap")


@works(
    "8 chats: counts, TTFT, TPOT; in ITL it counts the role and the last, empty delta as tokens, too",
    "`--backend openai-chat --endpoint /v1/chat/completions --ignore-eos`",
)
def chats(server: Server) -> None:
    gaps = bench(server, "openai-chat", "/v1/chat/completions")
    equal([len(each) for each in gaps], [OUTPUT_LEN + 1] * NUM, "gaps between chunks")


main()
