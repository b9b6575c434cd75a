"""What a model's files can say beyond the plain case: computed as transformers computes it, or refused by name."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from common.config import ModelConfig
from common.errors import ModelError
from common.gguf.file import cached_folder
from common.llama import Llama
from common.weights import resolve
from tests.common.test_gguf_file import metadata_of, tensors_of, tiny_model, write_gguf
from tests.kit.checkpoints import tiny_llama
from tests.kit.models import OneShotCache

PROMPT = [(17 * i + 3) % 250 for i in range(200)]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def changed(folder: Path, **changes: Any) -> Path:
    """A TINY whose config.json has these keys besides or instead; without any rope but theirs."""
    tiny_llama(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def logits(folder: Path) -> torch.Tensor:
    model = Llama.from_folder(folder, torch.device("cpu"), torch.float32)
    with torch.inference_mode():
        hidden = model.forward(torch.tensor(PROMPT), torch.arange(len(PROMPT)), OneShotCache([len(PROMPT)]))
        return model.logits(hidden)


def reference_logits(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        return LlamaForCausalLM.from_pretrained(folder)(torch.tensor([PROMPT])).logits[0]


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        Llama.from_folder(folder, torch.device("cpu"), torch.float32)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- config.json


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0}, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": LLAMA3, "original_max_position_embeddings": 64},
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 256}, "original_max_position_embeddings": 64},
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}, "rope_theta": 5e5},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 77.0}, "rope_theta": 5e5},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "original_max_position_embeddings": 64}},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": None}},
        {"pretraining_tp": 2, "attention_dropout": 0.1, "hidden_act": "swish"},
        {"residual_multiplier": 1.0, "sliding_window": None, "layer_types": ["full_attention"] * 2},
        {"use_sliding_window": False, "sliding_window": 4},
    ],
    ids=str,
)
def test_unt_4_what_is_read_is_computed_as_transformers_computes_it(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = changed(tmp_path, **changes)
    torch.testing.assert_close(logits(folder), reference_logits(folder), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "scaling", [{"type": "linear", "factor": 4.0}, LLAMA3 | {"original_max_position_embeddings": 64}]
)
def test_unt_4_neither_of_two_ropes_that_differ_is_dropped_in_silence(scaling: dict[str, Any], tmp_path: Path) -> None:
    plain = {"rope_type": "default", "rope_theta": 500000.0}
    message = refusal(changed(tmp_path, rope_parameters=plain, rope_scaling=scaling))
    assert "config.json has rope_scaling" in message
    assert "rope_parameters" in message
    assert "contradict each other" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3", "factor": 2.0}}, "rope_type 'llama3' and the type"),
        ({"rope_parameters": {"rope_type": "default", "factor": 8.0}}, "config.json has factor = 8.0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 1.5}}, "attention_factor = 1.5"),
        ({"rope_scaling": LLAMA3}, "has no 'original_max_position_embeddings'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "config.json has full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"attention_multiplier": 0.0078125}, "attention_multiplier = 0.0078125"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier = 12.0"),
        ({"residual_multiplier": 0.22}, "residual_multiplier = 0.22"),
        ({"logits_scaling": 8.0}, "logits_scaling = 8.0"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"is_causal": False}, "is_causal = False"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"compression_config": {"format": "int-quantized"}}, "quantised"),
    ],
    ids=str,
)
def test_unt_4_what_would_change_the_maths_is_refused_by_name(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    message = refusal(changed(tmp_path, **changes))
    assert words in message
    assert "config.json" in message or "quantised" in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"a": ' + b"[" * 100_000, "config.json is not valid JSON"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "config.json is not valid JSON"),
        (b'{"architectures": ["LlamaForCausalLM"]}', "config.json has no model_type"),
    ],
    ids=["brackets", "digits", "no model_type"],
)
def test_unt_49_a_config_that_cannot_be_is_told_in_one_sentence(content: bytes, words: str, tmp_path: Path) -> None:
    changed(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    assert words in refusal(tmp_path)


def test_unt_49_an_end_token_that_cannot_be_is_told_with_the_file_that_names_it(tmp_path: Path) -> None:
    folder = changed(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    assert f"{folder / 'generation_config.json'} holds a value that cannot be: eos_token_id is '</s>'" in refusal(
        folder
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**12}, r"weights of this shape \(config.json\) need .* GiB in float32"),
        ({"hidden_size": 10**30}, r"weights of this shape \(config.json\) need .* GiB in float32"),
        ({"num_attention_heads": 128, "num_key_value_heads": 128}, "head_dim of 0"),
    ],
    ids=str,
)
def test_unt_49_a_model_larger_than_memory_is_told_before_it_is_loaded(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = {"model_type": "llama", "vocab_size": 272, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4} | changes
    changed(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=words):
        Llama.from_folder(tmp_path, torch.device("cpu"), torch.float32)


# --- tensors


def test_unt_3_old_buffers_of_cosines_and_sines_are_skipped(tmp_path: Path) -> None:
    folder = changed(tmp_path)
    expected = logits(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in ("cos_cached", "sin_cached", "inv_freq"):
        tensors[f"model.layers.0.self_attn.rotary_emb.{name}"] = torch.ones(1, 1, 8, 16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(folder), expected)


def test_unt_49_weights_that_are_a_folder_are_named(tmp_path: Path) -> None:
    folder = changed(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    assert str(folder / "model.safetensors") in refusal(folder)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"weight_map": ' + "9" * 5000 + "}"])
def test_unt_49_an_index_that_cannot_be_read_is_named(content: str, tmp_path: Path) -> None:
    folder = changed(tmp_path)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(content)
    assert f"{folder / 'model.safetensors.index.json'} is damaged" in refusal(folder)


# --- GGUF


def gguf_file(folder: Path, name: str = "tiny.gguf", *, eos: str | None = None, **changes: Any) -> Path:
    """A file of the tiny model; `eos` renames token 1, and `None` takes a key out."""
    model = tiny_model()
    metadata = metadata_of(model) | {key.replace("__", "."): value for key, value in changes.items()}
    if eos is not None:
        tokens = list(metadata["tokenizer.ggml.tokens"])
        metadata["tokenizer.ggml.tokens"] = [tokens[0], eos, "<|eot_id|>", *tokens[3:]]
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return write_gguf(folder / name, metadata, tensors_of(model))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("MINI_VLLM_CACHE", str(folder))
    return folder


def end_token_ids(file: Path) -> tuple[int, ...]:
    return ModelConfig.from_folder(cached_folder(file)).eos_token_ids


def test_unt_6_a_turns_end_is_found_by_its_name_where_no_key_names_it(tmp_path: Path) -> None:
    assert end_token_ids(gguf_file(tmp_path, eos="<|end_of_text|>")) == (1, 2)


def test_unt_6_turns_ends_are_found_by_their_keys(tmp_path: Path) -> None:
    file = gguf_file(tmp_path, tokenizer__ggml__eot_token_id=3, tokenizer__ggml__eom_token_id=2)
    assert end_token_ids(file) == (1, 3, 2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.attn_factor", 1.5),
        ("llama.rope.scaling.yarn_attn_factor", 0.5),
        ("llama.rope.scaling.yarn_ext_factor", 1.0),
        ("llama.rope.scaling.alpha", 1000.0),
        ("llama.rope.dimension_sections", [16, 24, 24]),
        ("llama.attention.causal", False),
        ("llama.attention.scale", 0.25),
        ("llama.attention.sliding_window", 4096),
        ("llama.attention.clamp_kqv", 8.0),
        ("llama.attention.max_alibi_bias", 8.0),
        ("llama.attention.temperature_length", 8192),
        ("llama.logit_scale", 0.5),
        ("llama.embedding_scale", 12.0),
        ("llama.expert_count", 8),
        ("llama.use_parallel_residual", True),
        ("llama.pooling_type", 1),
        ("llama.invented_next_year", 3),
        ("general.type", "adapter"),
    ],
)
def test_unt_6_what_would_change_the_maths_is_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    file = gguf_file(tmp_path, **{key: value})
    with pytest.raises(ModelError) as caught:
        cached_folder(file)
    assert str(caught.value).startswith(f"{file} cannot be converted: ")
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.attn_factor", 1.0),
        ("llama.rope.scaling.original_context_length", 64),
        ("llama.rope.scaling.finetuned", True),
        ("llama.attention.causal", True),
        ("llama.attention.layer_norm_epsilon", 1e-5),
        ("llama.expert_count", 0),
        ("llama.expert_used_count", 0),
        ("llama.vocab_size", 300),
        ("llama.tensor_data_layout", "Meta AI original pth"),
        ("general.type", "model"),
    ],
)
def test_unt_6_what_changes_nothing_is_taken(key: str, value: Any, tmp_path: Path) -> None:
    folder = cached_folder(gguf_file(tmp_path, **{key: value}))
    torch.testing.assert_close(logits(folder), reference_of_tiny_model(), rtol=1e-4, atol=1e-4)


def reference_of_tiny_model() -> torch.Tensor:
    with torch.inference_mode():
        return tiny_model()(torch.tensor([PROMPT])).logits[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.eos_token_id", 1.0),
        ("tokenizer.ggml.eos_token_id", "1"),
        ("tokenizer.ggml.bos_token_id", True),
        ("llama.block_count", 2.0),
        ("llama.block_count", "2"),
        ("llama.block_count", 10**9),
        ("llama.block_count", 0),
        ("llama.attention.layer_norm_rms_epsilon", "1e-5"),
        ("llama.attention.layer_norm_rms_epsilon", 0.0),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count", 100),
        ("llama.attention.head_count", 3),
        ("llama.attention.head_count_kv", 0),
        ("llama.attention.head_count_kv", [0, 0]),
        ("llama.context_length", 0),
        ("llama.context_length", -1.0),
        ("llama.embedding_length", "64"),
        ("llama.feed_forward_length", [96, 96]),
        ("llama.rope.freq_base", 0.0),
        ("llama.rope.freq_base", float("nan")),
        ("llama.rope.scaling.factor", "2"),
        ("llama.rope.scaling.type", 1),
        ("tokenizer.ggml.tokens", "abc"),
        ("tokenizer.ggml.tokens", [1, 2, 3]),
        ("tokenizer.ggml.merges", [1, 2]),
        ("tokenizer.ggml.token_type", ["a"]),
        ("tokenizer.ggml.model", 5),
        ("tokenizer.chat_template", 5),
        ("tokenizer.ggml.add_bos_token", "yes"),
        ("split.count", "2"),
    ],
    ids=str,
)
def test_unt_49_metadata_of_another_kind_is_named_with_its_file(
    key: str, value: Any, tmp_path: Path, cache: Path
) -> None:
    file = gguf_file(tmp_path, **{key: value})
    with pytest.raises(ModelError) as caught:
        cached_folder(file)
    assert str(caught.value).startswith(f"{file} cannot be converted: ")
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not [folder for folder in cache.iterdir() if folder.is_dir()]


def test_unt_49_a_gguf_may_be_named_in_capitals(tmp_path: Path) -> None:
    file = gguf_file(tmp_path, "TINY.GGUF")
    assert resolve(file) == cached_folder(file)
    with pytest.raises(ModelError, match=f"There is no file {tmp_path / 'OTHER.GGUF'}"):
        resolve(os.fspath(tmp_path / "OTHER.GGUF"))
