"""v0.10: many replicas of the server on Ray Serve, each with a cache of its own, and a router that knows them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.sampling_params import SamplingParams as SamplingParams

    from .engine import LLMEngine as LLMEngine
    from .llm import LLM as LLM

__all__ = ["LLM", "LLMEngine", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # Lazy, so that importing one file of the package, or asking for --help, does not load torch.
    if name == "LLM":
        from .llm import LLM

        return LLM
    if name == "LLMEngine":
        from .engine import LLMEngine

        return LLMEngine
    if name == "SamplingParams":
        from common.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
