"""lm-eval: evaluations, here of tasks that lie on this machine; `local-completions` and `local-chat-completions`.

That its figures are those of its own `hf` model is shown by a measurement of its own; here it is whether they work.
"""

import json
import tempfile
from pathlib import Path

from scenario import Server, equal, main, program, works

GENERATE = """
task: local_generate
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n\\n"], do_sample: false, temperature: 0, max_gen_toks: MAX_TOKENS}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""


def evaluate(server: Server, task: str, rows: list[dict], model: str, route: str, *more: str) -> dict:
    """The task's figures."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        text = task.replace("FILE", str(file)).replace("MAX_TOKENS", str(server.max_tokens))
        (Path(folder) / "task.yaml").write_text(text)
        [name] = [line.removeprefix("task: ") for line in text.splitlines() if line.startswith("task: ")]
        options = {
            "model": server.model,
            "base_url": f"{server.api}/{route}",
            "tokenizer_backend": "huggingface",
            "tokenizer": server.folder,
            "num_concurrent": 2,
            "max_retries": 1,
        }
        program(
            *("lm_eval", "run", "--model", model, "--tasks", name, "--include_path", folder),
            *("--model_args", ",".join(f"{key}={value}" for key, value in options.items())),
            *("--output_path", folder, *more),
            cwd=folder,
        )
        [results] = Path(folder).rglob("results_*.json")
        return json.loads(results.read_text())["results"][name]


@works("a generating task", "`local-completions`, `base_url=.../v1/completions`, `tokenizer=FOLDER`")
def generate(server: Server) -> None:
    rows = [{"question": server.prompt, "answer": answer} for answer in (server.completion_text, "no")]
    figures = evaluate(server, GENERATE, rows, "local-completions", "completions")
    equal(figures["exact_match,none"], 0.5, "exact_match")


@works("the same as a chat", "`local-chat-completions --apply_chat_template`, `base_url=.../v1/chat/completions`")
def generate_chat(server: Server) -> None:
    rows = [{"question": server.question, "answer": answer} for answer in (server.chat_text, "no")]
    chat = ("local-chat-completions", "chat/completions", "--apply_chat_template")
    figures = evaluate(server, GENERATE, rows, *chat)
    equal(figures["exact_match,none"], 0.5, "exact_match")


@works("a multiple-choice task, by the prompt's log-probabilities", "`local-completions`")
def choice(server: Server) -> None:
    questions = ["The capital of France is", "The capital of Italy is", "The capital of Spain is"]
    choices = [" Paris", " Rome", " Madrid", " zzz"]
    rows = [{"question": text, "choices": choices, "label": label} for label, text in enumerate(questions)]
    figures = evaluate(server, CHOICE, rows, "local-completions", "completions")
    equal(figures["acc,none"], 1.0, "acc")


main()
