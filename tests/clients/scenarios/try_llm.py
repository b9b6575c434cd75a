"""llm: a program for the terminal, and a library."""

import json
import os
import tempfile
from pathlib import Path

from scenario import Server, equal, main, program, refused, works

SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}}}'


def options(server: Server) -> tuple[str, ...]:
    return "-o", "temperature", "0", "-o", "max_tokens", str(server.max_tokens)


def endpoint(server: Server, *arguments: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"LLM_USER_PATH": folder}
        return program("llm", "openai", "endpoint", server.api, *arguments, env=environment)


@works("a prompt, streamed and whole; the list of models", "`llm openai endpoint http://127.0.0.1:8000/v1 -m NAME`")
def prompt(server: Server) -> None:
    question = (server.question, "-m", server.model, *options(server))
    equal(endpoint(server, *question).strip(), server.chat_text, "streamed text")
    equal(endpoint(server, *question, "--no-stream").strip(), server.chat_text, "whole text")
    equal(endpoint(server, "--models").split(), [server.model], "models")


@works("chat and completion models with a name of their own, and its log of tokens", "`extra-openai-models.yaml`")
def named(server: Server) -> None:
    with tempfile.TemporaryDirectory() as folder:
        models = [
            {"model_id": "mini", "model_name": server.model, "api_base": server.api},
            {"model_id": "mini-text", "model_name": server.model, "api_base": server.api, "completion": True},
        ]
        (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML, too

        def llm(*arguments: str) -> str:
            return program("llm", *arguments, env=os.environ | {"LLM_USER_PATH": folder})

        equal(llm("-m", "mini", server.question, *options(server)).strip(), server.chat_text, "chat")
        [entry] = json.loads(llm("logs", "--json", "-n", "1"))
        equal([entry["input_tokens"], entry["output_tokens"]], server.chat_usage, "tokens in the log")
        text = llm("-m", "mini-text", server.prompt, *options(server))
        equal(text.strip(), server.completion_text.strip(), "completion")


@refused("`--schema`", saying="there is no structured output.")
def schema(server: Server) -> None:
    endpoint(server, server.question, "-m", server.model, "--schema", SCHEMA)


@refused("tools: `-T`", saying="there are no tools.")
def tools(server: Server) -> None:
    endpoint(server, server.question, "-m", server.model, "-T", "llm_version")


@refused("`--responses`", saying="/v1/responses")
def responses(server: Server) -> None:
    endpoint(server, server.question, "-m", server.model, "--responses")


main()
