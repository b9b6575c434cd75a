"""guidellm: vLLM's project for benchmarks of deployments. It asks for the counts in every chunk."""

import json
import tempfile
from pathlib import Path

from scenario import Server, equal, main, positive, program, works

NUM, OUTPUT_LEN = 8, 16
FIGURES = ("time_to_first_token_ms", "inter_token_latency_ms", "time_per_output_token_ms")


def bench(server: Server, route: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        flags = {
            "backend": f"kind=openai_http,target={server.url},request_format={route}",
            "profile": "kind=concurrent,streams=2",
            "constraint": f"kind=max_requests,count={NUM}",
            "tokenizer": f"kind=huggingface_auto,model={server.folder}",
            "data": f"kind=synthetic_text,prompt_tokens=30,output_tokens={OUTPUT_LEN}",
            "output": f"kind=json,path={file}",
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        program("guidellm", "run", *words, "--disable-console", cwd=folder)
        [found] = json.loads(file.read_text())["benchmarks"]
    equal(found["metrics"]["request_totals"]["successful"], NUM, "completed requests")
    equal(found["metrics"]["request_totals"]["total"], NUM, "requests")
    for request in found["requests"]["successful"]:
        equal(request["output_tokens"], OUTPUT_LEN, "tokens of an answer")
        equal(request["prompt_tokens"] >= 30, True, "the prompt's tokens")
        for figure in FIGURES:
            positive(request[figure], figure)
    gaps = found["metrics"]["inter_token_latency_ms"]["successful"]["count"]
    equal(gaps, NUM * (OUTPUT_LEN - 1), "gaps between tokens")


@works("8 chats: counts, TTFT, ITL, TPOT", "`--tokenizer kind=huggingface_auto,model=FOLDER`")
def chats(server: Server) -> None:
    bench(server, "/v1/chat/completions")


@works("8 completions: counts, TTFT, ITL, TPOT", "the same, and `--backend ...,request_format=/v1/completions`")
def completions(server: Server) -> None:
    bench(server, "/v1/completions")


main()
