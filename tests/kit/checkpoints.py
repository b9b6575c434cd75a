"""TINY: small random Llamas, saved as Hugging Face saves them, with transformers' own model as the reference."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import transformers

# The vocabulary is BYTE-TOK's (256 bytes and a few specials), with head rows to spare as real models have.
TINY: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": [257, 258],
    "initializer_range": 0.2,  # ten times the usual, so that the logits are not flat
}


def tiny_llama(folder: Path, *, seed: int = 0, **config: Any) -> "transformers.LlamaForCausalLM":
    """Write a random float32 Llama into `folder` and return it.

    Args:
        folder: made where it is absent; gets config.json, generation_config.json and model.safetensors.
        seed: of the weights. The caller's own random numbers are left as they were.
        config: replaces fields of `TINY`, or adds others of `LlamaConfig`.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**TINY | config)).eval()
        with torch.no_grad():
            # transformers starts biases at zero and norms at one, where a forgotten or swapped one would not show.
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.5)
                elif "norm" in name:
                    parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model
