"""aiperf: NVIDIA's load generator. It also reads `/metrics`, under vLLM's names."""

import json
import os
import tempfile
from pathlib import Path

from scenario import Server, equal, main, positive, program, works

NUM, OUTPUT_LEN = 8, 16
FLAGS = "`--streaming --use-server-token-count --tokenizer FOLDER --extra-inputs ignore_eos:true`"


def bench(server: Server, endpoint_type: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "model": server.model,
            "url": server.url,
            "endpoint-type": endpoint_type,
            "tokenizer": server.folder,
            "request-count": NUM,
            "concurrency": 2,
            "isl": 30,
            "osl": OUTPUT_LEN,
            "extra-inputs": "ignore_eos:true",
            "artifact-dir": folder,
            "ui": "none",
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        # Told that the hub is out of reach, it takes the tokenizer's folder for a name of the hub.
        online = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        program("aiperf", "profile", "--streaming", "--use-server-token-count", *words, cwd=folder, env=online)
        found = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
        lines = (Path(folder) / "profile_export.jsonl").read_text().splitlines()
        scraped = (Path(folder) / "server_metrics_export.csv").read_text()
    equal(found["request_count"]["avg"], NUM, "completed requests")
    equal(found["error_summary"], [], "errors")
    equal(len(lines), NUM, "records")
    for line in lines:
        metrics = json.loads(line)["metrics"]
        equal(metrics["output_sequence_length"]["value"], OUTPUT_LEN, "tokens of an answer")
        equal(metrics["input_sequence_length"]["value"] >= 28, True, "the prompt's tokens")
        positive(metrics["time_to_first_token"]["value"], "TTFT")
        positive(metrics["inter_token_latency"]["value"], "ITL")
    equal("vllm:num_requests_running" in scraped, True, "what it reads of /metrics")


@works("8 chats: counts, TTFT, ITL, and what it reads of `/metrics`", FLAGS)
def chats(server: Server) -> None:
    bench(server, "chat")


@works("8 completions: the same", "the same flags, `--endpoint-type completions`")
def completions(server: Server) -> None:
    bench(server, "completions")


main()
