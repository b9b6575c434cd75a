"""A model of which only the shape is real: random weights, and a tokenizer for ids without text.

How long a step takes, and how much memory, depends on a model's shape and not on its numbers. So `--load-format dummy`
measures a model without its gigabytes; what it writes is noise. Changes in no milestone.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.config import ModelConfig
from common.errors import ModelError, RequestError
from common.tokenizer import NOTHING, Tokenizer
from common.units import format_bytes
from common.weights import check_memory, expected_shapes, fusion_plan

STD = 0.02  # Llama's own `initializer_range`: activations stay small through all layers, whatever the dtype


def dummy_weights(config: ModelConfig, device: torch.device, dtype: torch.dtype, *, seed: int = 0) -> dict[str, Tensor]:
    """Random weights under the names and in the shapes of `weights.load_weights`.

    Each tensor is drawn where it stays, so that there is never a second copy: normal numbers of deviation `STD`, ones
    for the norms. The same seed gives the same weights again on the same kind of device, in the same dtype.

    Raises:
        ModelError: they do not fit into memory.
    """
    check_memory(config, device, dtype)
    shapes = expected_shapes(config)
    generator = torch.Generator(device).manual_seed(seed)
    weights: dict[str, Tensor] = {}
    try:
        for name, sources in fusion_plan(config).items():
            rows = sum(shapes[source][0] for source in sources)
            target = torch.empty((rows, *shapes[sources[0]][1:]), dtype=dtype, device=device)
            weights[name] = (
                target.fill_(1.0) if name.endswith("norm") else target.normal_(0.0, STD, generator=generator)
            )
    except RuntimeError as error:
        if "memory" not in str(error):  # the words of both allocators: "CUDA out of memory", "can't allocate memory"
            raise
        needed = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
        raise ModelError(
            f"The weights of this shape need {format_bytes(needed)} in {str(dtype).removeprefix('torch.')}, more than "
            f"is free on {device}: choose a smaller shape, or a smaller dtype."
        ) from None
    if config.tie_word_embeddings:
        weights["lm_head"] = weights["embed_tokens"]
    return weights


def dummy_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer:
    """The tokenizer in the folder, which a shape alone does not need; without one, an `IdTokenizer`."""
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return Tokenizer.from_folder(folder)
    return IdTokenizer(config.vocab_size)


class IdTokenizer(Tokenizer):
    """Stands in where a model has no tokenizer: id 123 reads `<123>`, and text has no ids.

    Args:
        vocab_size: ids are below this.
    """

    def __init__(self, vocab_size: int) -> None:
        # Not the parent's: there is nothing of Hugging Face's inside.
        self.vocab_size = vocab_size
        self.special_token_ids = frozenset()
        self.bos_token_id = self.eos_token_id = None
        self.length_bound = None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The ids, each in angle brackets."""
        return b"".join(map(self.token_bytes, token_ids)).decode()

    def render_chat(
        self,
        messages: object,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] = NOTHING,
    ) -> str:
        """Raise a `RequestError`: a chat is text."""
        raise self._refusal("messages")

    def token_bytes(self, token_id: int) -> bytes:
        """`<123>`, for an id of the vocabulary."""
        return b"<%d>" % token_id if 0 <= token_id < self.vocab_size else b""

    def first_token_bytes(self, token_id: int) -> bytes:
        """As anywhere else."""
        return self.token_bytes(token_id)

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        raise self._refusal(param)

    def _refusal(self, param: str) -> RequestError:
        return RequestError(
            "This model has no tokenizer, as it was made from a config.json alone: give the prompt as token ids.",
            param=param,
        )
