"""A model of which only the shape is real: its weights, what has to be in the folder, and its tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common import dummy
from common.config import ModelConfig
from common.dummy import IdTokenizer, dummy_weights
from common.errors import ModelError, RequestError
from common.llama import Llama, pack
from common.loading import load
from common.weights import load_weights
from tests.kit.checkpoints import TINY, tiny_llama
from tests.kit.models import OneShotCache
from tests.kit.tokenizers import save_byte_tokenizer

CPU = torch.device("cpu")


def shape(folder: Path, **changes: Any) -> Path:
    """A folder with a config.json, and nothing else."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | TINY | changes))
    return folder


def weights(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, torch.Tensor]:
    return dummy_weights(ModelConfig.from_folder(folder), CPU, dtype, **options)


def load_dummy(folder: Path, **options: Any) -> Any:
    return load(folder, None, **{"device": "cpu", "dtype": "float32", "load_format": "dummy"} | options)


# Weights


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}, {"head_dim": 32}],
)
def test_names_and_shapes_are_those_of_a_checkpoint(changes: dict[str, Any], tmp_path: Path) -> None:
    tiny_llama(tmp_path, **changes)
    config = ModelConfig.from_folder(tmp_path)
    loaded = load_weights(tmp_path, config, CPU, torch.float32)
    made = dummy_weights(config, CPU, torch.float32)
    assert {name: tensor.shape for name, tensor in made.items()} == {name: t.shape for name, t in loaded.items()}
    assert (made["lm_head"] is made["embed_tokens"]) == changes.get("tie_word_embeddings", False)


def test_the_seed_says_which_numbers_and_the_callers_own_are_left_alone(tmp_path: Path) -> None:
    shape(tmp_path)
    before = torch.random.get_rng_state()
    first, again, other = weights(tmp_path), weights(tmp_path), weights(tmp_path, seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert [name for name in first if torch.equal(first[name], other[name])] == [n for n in first if n.endswith("norm")]
    assert not torch.equal(first["layers.0.o_proj"], first["layers.1.o_proj"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_are_ones_and_all_else_is_small(dtype: torch.dtype, tmp_path: Path) -> None:
    shape(tmp_path, attention_bias=True)
    for name, tensor in weights(tmp_path, dtype).items():
        assert tensor.dtype == dtype
        if name.endswith("norm"):
            assert torch.equal(tensor, torch.ones_like(tensor))
        else:
            assert abs(float(tensor.float().std()) - 0.02) < 0.004, name
            assert abs(float(tensor.float().mean())) < 0.004, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_activations_stay_finite_through_many_layers(dtype: torch.dtype, tmp_path: Path) -> None:
    config = ModelConfig.from_folder(shape(tmp_path, num_hidden_layers=32, hidden_size=256, intermediate_size=896))
    model = Llama.packed(config, dummy_weights(config, CPU, dtype))
    hidden = model.forward(torch.arange(40), torch.arange(40), OneShotCache([40]))
    assert model.logits(hidden).isfinite().all()


def test_matrices_are_packed_as_those_of_a_checkpoint_and_the_plain_ones_are_gone(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(shape(tmp_path))
    made = dummy_weights(config, CPU, torch.float32)
    plain = made["layers.0.qkv_proj"]
    model = Llama.packed(config, made)
    is_packed = pack(plain).is_mkldnn  # not in every build of torch
    assert (model.layers[0].qkv_proj.is_mkldnn, made["layers.0.qkv_proj"].is_mkldnn) == (is_packed, is_packed)
    assert model.lm_head.is_mkldnn == is_packed
    assert not model.embed_tokens.is_mkldnn
    dense = model.layers[0].qkv_proj.to_dense() if is_packed else model.layers[0].qkv_proj
    assert torch.equal(dense, plain)


def test_too_large_a_shape_is_told_with_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    shape(tmp_path)
    monkeypatch.setattr(dummy.torch, "empty", full)
    with pytest.raises(ModelError, match=r"need 425\.25 KiB in float32, more than is free on cpu: choose a smaller"):
        weights(tmp_path)


def test_other_errors_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault of ours")

    shape(tmp_path)
    monkeypatch.setattr(dummy.torch, "empty", broken)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        weights(tmp_path)


# What the folder holds


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    model, tokenizer = load_dummy(shape(tmp_path), dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert isinstance(tokenizer, IdTokenizer)
    assert tokenizer.vocab_size == 272


def test_a_checkpoint_in_the_folder_is_not_read(tmp_path: Path) -> None:
    shape(tmp_path)
    (tmp_path / "model.safetensors").write_text("broken")
    assert load_dummy(tmp_path)[0].config.num_layers == 2


def test_a_tokenizer_in_the_folder_is_taken(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    assert load_dummy(shape(tmp_path))[1].encode("Hi") == [72, 105]


def test_a_hub_id_is_asked_for_all_but_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        return str(tmp_path)

    shape(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    load_dummy("some-org/some-model")  # type: ignore[arg-type]
    assert asked == [("some-org/some-model", ["*.json", "*.model", "*.jinja"])]


def test_a_folder_without_a_config_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_dummy(tmp_path)


def test_an_unknown_load_format_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"There is no load format 'gguf': choose auto or dummy\."):
        load_dummy(shape(tmp_path), load_format="gguf")


def test_by_default_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        load(shape(tmp_path), None, device="cpu", dtype="float32")


# The tokenizer that knows ids only


def test_ids_are_written_in_angle_brackets() -> None:
    tokenizer = IdTokenizer(272)
    assert tokenizer.decode([0, 123, 271]) == "<0><123><271>"
    assert (tokenizer.token_text(5), tokenizer.token_bytes(5), tokenizer.first_token_bytes(5)) == (
        "<5>",
        b"<5>",
        b"<5>",
    )
    assert tokenizer.token_bytes(272) == b""  # as every tokenizer for an id without a token
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.special_token_ids) == (None, None, frozenset())


@pytest.mark.parametrize(
    ("ask", "param"),
    [
        (lambda tokenizer: tokenizer.encode("Hi"), "prompt"),
        (lambda tokenizer: tokenizer.chat_token_ids([{"role": "user", "content": "Hi"}]), "messages"),
        (lambda tokenizer: tokenizer.render_chat([{"role": "user", "content": "Hi"}]), "messages"),
    ],
)
def test_text_is_refused(ask: Any, param: str) -> None:
    with pytest.raises(RequestError, match="give the prompt as token ids") as caught:
        ask(IdTokenizer(272))
    assert caught.value.param == param
