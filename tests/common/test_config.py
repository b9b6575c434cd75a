"""config.json in every spelling that is found in the wild, and what is refused instead of silently computed wrong."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import ModelConfig, RopeConfig
from common.errors import ModelError
from common.llama import rope_inv_freq
from common.loading import select_device, select_dtype
from common.weights import expected_shapes, load_weights
from tests.kit.checkpoints import tiny_llama

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "vocab_size": 272,
    "eos_token_id": 257,
}
LLAMA_3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(folder: Path, *, without: str = "", generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    config = {name: value for name, value in (LLAMA | changes).items() if name != without}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder)


def refusal(folder: Path, **changes: Any) -> str:
    with pytest.raises(ModelError) as caught:
        read(folder, **changes)
    return str(caught.value)


def test_every_field_is_read(tmp_path: Path) -> None:
    assert read(tmp_path) == ModelConfig(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        eos_token_ids=(257,),
        dtype="float32",
    )


def test_fields_that_are_left_out_have_the_formats_own_defaults(tmp_path: Path) -> None:
    names = ("hidden_act", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "eos_token_id")
    config = {name: value for name, value in LLAMA.items() if name not in names}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = ModelConfig.from_folder(tmp_path)
    assert (found.num_kv_heads, found.max_position_embeddings, found.rms_norm_eps) == (4, 2048, 1e-6)
    assert found.eos_token_ids == ()


def test_fields_of_the_other_value_are_read(tmp_path: Path) -> None:
    config = read(tmp_path, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (True, True, True)


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    tiny_llama(tmp_path, rope_parameters=LLAMA_3_1 | {"rope_theta": 5e5})
    config = ModelConfig.from_folder(tmp_path)
    assert config.rope == RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    assert (config.vocab_size, config.num_layers, config.num_heads, config.num_kv_heads) == (272, 2, 4, 2)
    assert (config.head_dim, config.eos_token_ids, config.dtype) == (16, (257, 258), "float32")


def test_kv_elements_count_kv_heads(tmp_path: Path) -> None:
    assert read(tmp_path).kv_elements_per_token == 2 * 2 * 2 * 16
    assert read(tmp_path, num_key_value_heads=None).kv_elements_per_token == 2 * 2 * 4 * 16


# Rotary embedding


def test_mdl_1_llama_3_1s_frequencies_are_blended_in_the_middle(tmp_path: Path) -> None:
    rope = read(tmp_path, rope_theta=5e5, rope_scaling=LLAMA_3_1).rope
    assert rope == RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    found = rope_inv_freq(rope, 128)
    raw = rope_inv_freq(RopeConfig(theta=5e5), 128)
    assert (found.shape, found.dtype) == ((64,), torch.float32)
    ratio = (found / raw).tolist()
    assert ratio[:29] == pytest.approx([1.0] * 29, rel=1e-6)
    assert all(1 / 8 < later < earlier < 1 for earlier, later in itertools.pairwise(ratio[29:35]))
    assert ratio[35:] == pytest.approx([1 / 8] * 29, rel=1e-6)
    exact = {0: 1.0, 28: 3.21144599e-03, 29: 2.16657076e-03, 34: 1.78507813e-04, 35: 9.55621235e-05, 63: 3.06892599e-07}
    assert {i: found[i].item() for i in exact} == pytest.approx(exact, rel=3e-7)
    assert [raw[29].item(), raw[34].item()] == pytest.approx([2.61609925e-03, 9.38473870e-04], rel=3e-7)


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({}, RopeConfig(10000.0)),
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_scaling": None}, RopeConfig(10000.0)),
        ({"rope_scaling": {}}, RopeConfig(10000.0)),
        ({"rope_scaling": {"rope_type": "default"}, "rope_theta": 7.0}, RopeConfig(7.0)),
        ({"rope_scaling": {"type": "default"}}, RopeConfig(10000.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(10000.0, "linear", 2.0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.5}}, RopeConfig(10000.0, "linear", 2.5)),
        ({"rope_scaling": LLAMA_3_1, "rope_theta": 5e5}, RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)),
        ({"rope_scaling": LLAMA_3_1 | {"type": "llama3"}}, RopeConfig(1e4, "llama3", 8.0, 1.0, 4.0, 8192)),
        ({"rope_scaling": {"type": "llama3"} | {**LLAMA_3_1, "rope_type": None}}, RopeConfig(1e4, "llama3", 8.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_theta": 5e5}}, RopeConfig(5e5)),
        ({"rope_parameters": None, "rope_theta": 3e5}, RopeConfig(3e5)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 9}}, RopeConfig(9.0, "linear", 4.0)),
        ({"rope_parameters": LLAMA_3_1 | {"rope_theta": 5e5}}, RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)),
        ({"rope_parameters": LLAMA_3_1, "rope_theta": 5e5}, RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)),
        ({"partial_rotary_factor": 1.0}, RopeConfig(10000.0)),
        ({"partial_rotary_factor": None}, RopeConfig(10000.0)),
    ],
)
def test_mdl_2_every_spelling_of_the_rotary_embedding_is_read(
    changes: dict[str, Any], rope: RopeConfig, tmp_path: Path
) -> None:
    assert read(tmp_path, **changes).rope == rope


def test_mdl_2_linear_divides_every_frequency() -> None:
    plain, linear = (rope_inv_freq(RopeConfig(*args), 16) for args in ((1e4,), (1e4, "linear", 2.0)))
    assert torch.equal(linear, plain / 2)
    assert plain.tolist() == pytest.approx([10 ** (-i / 2) for i in range(8)], rel=1e-6)


@pytest.mark.parametrize("kind", ["mystery", "yarn", "dynamic", "longrope", "LINEAR"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_mdl_2_an_unknown_rope_type_is_an_error(place: str, key: str, kind: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, **{place: {key: kind, "factor": 2.0}})
    assert repr(kind) in message
    assert "default, linear, llama3" in message


@pytest.mark.parametrize("missing", [name for name in LLAMA_3_1 if name != "rope_type"])
def test_mdl_2_a_missing_number_is_named(missing: str, tmp_path: Path) -> None:
    scaling = {name: value for name, value in LLAMA_3_1.items() if name != missing}
    assert f"config.json has no '{missing}'" in refusal(tmp_path, rope_scaling=scaling)


@pytest.mark.parametrize(
    "changes", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.25}}]
)
def test_a_partial_rotary_embedding_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    assert "partial rotary" in refusal(tmp_path, **changes)


# Heads


def test_mdl_5_an_explicit_head_dim_counts(tmp_path: Path) -> None:
    tiny_llama(tmp_path, head_dim=32)
    config = ModelConfig.from_folder(tmp_path)
    assert (config.hidden_size, config.num_heads, config.head_dim) == (64, 4, 32)
    shapes = expected_shapes(config)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (128, 64)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (64, 64)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (64, 128)
    weights = load_weights(tmp_path, config, torch.device("cpu"), torch.float32)
    assert weights["layers.1.qkv_proj"].shape == (128 + 64 + 64, 64)
    assert weights["layers.1.o_proj"].shape == (64, 128)
    assert rope_inv_freq(config.rope, config.head_dim).shape == (16,)
    assert config.kv_elements_per_token == 2 * 2 * 2 * 32


def test_mdl_5_without_head_dim_it_is_hidden_size_by_heads(tmp_path: Path) -> None:
    assert read(tmp_path, head_dim=None).head_dim == 16
    assert read(tmp_path).head_dim == 16
    assert read(tmp_path, head_dim=32).head_dim == 32


def test_kv_heads_have_to_divide_the_heads(tmp_path: Path) -> None:
    message = refusal(tmp_path, num_key_value_heads=3)
    assert "4 heads" in message
    assert "3 KV heads" in message


# End tokens


@pytest.mark.parametrize(
    ("in_config", "in_generation", "ids"),
    [
        (128001, [128001, 128008, 128009], (128001, 128008, 128009)),
        ([128001, 128008], [128009, 128001], (128009, 128001, 128008)),
        ([5, 6], None, (5, 6)),
        (5, {}, (5,)),
        (None, 7, (7,)),
        (5, 7, (7, 5)),
        (None, None, ()),
        (0, 0, (0,)),
    ],
)
def test_eos_1_end_tokens_of_both_files_count_and_none_twice(
    in_config: Any, in_generation: Any, ids: tuple[int, ...], tmp_path: Path
) -> None:
    generation = None if in_generation is None else {} if in_generation == {} else {"eos_token_id": in_generation}
    assert read(tmp_path, eos_token_id=in_config, generation=generation).eos_token_ids == ids


# The dtype


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "torch.float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
        ({"torch_dtype": None}, "float32"),
    ],
)
def test_mdl_7_both_keys_of_the_dtype_are_read(changes: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    assert read(tmp_path, **changes).dtype == dtype


def test_mdl_7_auto_is_never_float16() -> None:
    assert select_dtype("auto", torch.device("cpu")) == torch.float32
    assert select_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert select_dtype("float16", torch.device("cpu")) == torch.float16
    assert select_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16
    assert select_dtype("float32", torch.device("cuda")) == torch.float32


def test_an_unknown_dtype_or_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"'int8'.*float32, bfloat16, float16"):
        select_dtype("int8", torch.device("cpu"))
    with pytest.raises(ModelError, match=r"'tpu'.*auto, cpu or cuda"):
        select_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match=r"no CUDA device.*--device cpu"):
        select_device("cuda")
    assert select_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert select_device("auto") == torch.device("cuda")


# Refusals


def test_another_architecture_is_named(tmp_path: Path) -> None:
    from transformers import Qwen2Config

    Qwen2Config(hidden_size=64, num_attention_heads=4, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_folder(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} holds a qwen2 model (Qwen2ForCausalLM), but this engine serves Llama models "
        "(model_type llama) only: choose another model."
    )


def test_a_model_of_no_named_type_is_refused(tmp_path: Path) -> None:
    assert "of no named type" in refusal(tmp_path, without="model_type")
    assert "gpt2" in refusal(tmp_path, model_type="gpt2", without="architectures")


def test_a_quantised_model_is_refused_with_its_method(tmp_path: Path) -> None:
    message = refusal(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    assert "quantised (awq)" in message
    assert "unquantised" in message
    assert read(tmp_path, quantization_config=None).num_layers == 2


def test_another_activation_is_refused(tmp_path: Path) -> None:
    assert "'gelu'" in refusal(tmp_path, hidden_act="gelu")


@pytest.mark.parametrize(
    "missing", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_a_missing_key_is_named(missing: str, tmp_path: Path) -> None:
    assert f"{tmp_path / 'config.json'} has no '{missing}'" in refusal(tmp_path, without=missing)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"model_type": "llama",', "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b"\xff\xfe\x00", "is not valid JSON"),
        (b"[1, 2]", "does not hold a JSON object"),
        (b"null", "does not hold a JSON object"),
    ],
)
def test_a_broken_file_is_named(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    read(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_folder(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / name} {words}")


def test_a_folder_without_config_says_what_a_model_folder_needs(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json: a model folder needs config\.json, "):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": "linear"},
        {"hidden_size": "big"},
        {"num_attention_heads": None},
        {"eos_token_id": "x"},
        {"architectures": 5},
        {"quantization_config": "awq"},
        {"head_dim": -1},
        {"head_dim": 15},
        {"head_dim": "16"},
        {"num_key_value_heads": -2},
        {"max_position_embeddings": "big"},
        {"rms_norm_eps": "x"},
        {"rms_norm_eps": 0},
        {"tie_word_embeddings": "false"},
        {"rope_theta": -1},
        {"rope_scaling": {"factor": 4.0}},
        {"rope_scaling": {"type": "linear", "factor": 0}},
        {"rope_scaling": LLAMA_3_1 | {"low_freq_factor": 4.0}},
    ],
)
def test_a_value_that_cannot_be_is_told_without_a_traceback(changes: dict[str, Any], tmp_path: Path) -> None:
    message = refusal(tmp_path, **changes)
    assert "config.json" in message or "quantised (awq)" in message


def test_a_config_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match=r"config\.json cannot be read: Is a directory"):
        ModelConfig.from_folder(tmp_path)
