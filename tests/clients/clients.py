"""Which clients are tried, and what each needs to be installed. What is asked of each is in `scenarios/`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Client:
    """One client: its scenario is `scenarios/try_NAME.py`, or `.mjs` for one of npm's.

    `requirements` are what pip or npm is asked for, and the first one is the client, whose version is reported. Without
    any, the environment is one that the command line names by `--NAME-venv`.
    """

    title: str
    name: str
    requirements: tuple[str, ...] = ()
    is_npm: bool = False
    seconds: int = 180  # for its scenario, at most: most take 10


TORCH = "torch>=2.11,<2.14"  # what this project runs on: the CPU build is at hand where it is

CLIENTS = (
    Client("openai", "openai", ("openai",)),
    Client("litellm", "litellm", ("litellm",)),
    Client("langchain-openai", "langchain", ("langchain-openai",)),
    Client("llama-index-llms-openai-like", "llama_index", ("llama-index-llms-openai-like",)),
    Client("llm", "llm", ("llm",)),
    Client("dspy", "dspy", ("dspy",)),
    Client("pydantic-ai", "pydantic_ai", ("pydantic-ai-slim[openai]",)),
    Client("openai-agents", "openai_agents", ("openai-agents",)),
    Client("AI SDK", "ai_sdk", ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai"), is_npm=True),
    Client("anthropic", "anthropic", ("anthropic",)),
    Client("inspect-ai", "inspect_ai", ("inspect-ai", "openai")),
    Client("lm-eval", "lm_eval", ("lm-eval[api]", TORCH)),
    Client("guidellm", "guidellm", ("guidellm", TORCH)),
    Client("aiperf", "aiperf", ("aiperf",)),
    Client("vllm bench serve", "vllm_bench"),
)
