"""The Llama forward pass against transformers' modules, piece by piece and whole, in float32 at atol 1e-4."""

import types

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from common.config import ModelConfig
from common.llama import Llama, apply_rope, linear, mlp, pack, rms_norm, rope_cos_sin, rope_inv_freq
from common.weights import load_weights
from tests.kit.checkpoints import tiny_llama
from tests.kit.models import OneShotCache

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "mha": {"num_key_value_heads": 4},
    "gqa": {"num_key_value_heads": 2},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "llama3 rope": {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    """Our model and transformers' on the same weights, by the variant's name."""
    made = {}

    def build(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("variant")
            hf = tiny_llama(folder, **VARIANTS[name])
            made[name] = Llama.from_folder(folder, CPU, torch.float32), hf
        return made[name]

    return build


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_rms_norm_equals_transformers_also_on_large_and_tiny_values():
    norm = LlamaRMSNorm(64, eps=1e-5)
    norm.weight.copy_(torch.rand(64) + 0.5)
    for scale in (1e-3, 1.0, 2e4):
        x = torch.randn(7, 64) * scale
        close(rms_norm(x, norm.weight, 1e-5), norm(x))


def test_mdl_7_rms_norm_and_rope_compute_in_float32_whatever_the_input():
    x = (torch.randn(5, 64) * 300).bfloat16()
    weight = torch.ones(64).bfloat16()
    # One rounding, at the end: computed throughout in bfloat16 many values would differ.
    assert torch.equal(rms_norm(x, weight, 1e-5), rms_norm(x.float(), weight.float(), 1e-5).bfloat16())
    cos, sin = rope_cos_sin(torch.tensor([3000, 1, 2, 3, 4]), 1.0 / 10000 ** (torch.arange(0, 16, 2) / 16))
    assert cos.dtype == torch.float32
    heads = x.view(5, 4, 16)
    assert torch.equal(apply_rope(heads, cos, sin), apply_rope(heads.float(), cos, sin).bfloat16())


@pytest.mark.parametrize("name", ["gqa", "linear rope", "llama3 rope", "wide heads"])
def test_rotary_embedding_of_each_type_equals_transformers(variant, name):
    ours, hf = variant(name)
    positions = torch.tensor([0, 1, 5, 63, 64, 200, 511])
    head_dim = ours.config.head_dim
    x = torch.randn(len(positions), 4, head_dim)
    cos, sin = LlamaRotaryEmbedding(hf.config)(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    rotated = apply_rope(x, *rope_cos_sin(positions, rope_inv_freq(ours.config.rope, head_dim)))
    close(rotated, expected[0].transpose(0, 1))


@pytest.mark.parametrize("name", ["gqa", "biases"])
def test_mlp_equals_transformers(variant, name):
    ours, hf = variant(name)
    x = torch.randn(6, 64)
    close(mlp(x, ours.layers[1]), hf.model.layers[1].mlp(x))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("length", [1, 2, 33, 70])
def test_every_layers_output_and_the_logits_equal_transformers(variant, name, length):
    ours, hf = variant(name)
    token_ids = torch.randint(0, 259, (length,))
    theirs = hf(token_ids[None], output_hidden_states=True)
    positions = torch.arange(length)
    for num_layers in range(1, ours.config.num_layers):
        hidden = ours.forward(token_ids, positions, OneShotCache([length]), num_layers=num_layers)
        # Ours ends with the final norm wherever it stops; transformers' inner layers do not.
        close(hidden, hf.model.norm(theirs.hidden_states[num_layers][0]))
    hidden = ours.forward(token_ids, positions, OneShotCache([length]))
    close(hidden, theirs.hidden_states[-1][0])
    close(ours.logits(hidden), theirs.logits[0])


def test_rows_pick_tokens_without_changing_them(variant):
    ours, _ = variant("gqa")
    token_ids, positions = torch.randint(0, 259, (20,)), torch.arange(20)
    whole = ours.forward(token_ids, positions, OneShotCache([20]))
    picked = ours.forward(token_ids, positions, OneShotCache([20]), rows=torch.tensor([19, 3]))
    torch.testing.assert_close(picked, whole[[19, 3]], atol=1e-5, rtol=0)


def test_a_forward_leaves_the_weights_as_they_were(variant):
    ours, _ = variant("gqa")
    before = ours.embed_tokens.clone()
    forward = [ours.forward(torch.arange(20), torch.arange(20), OneShotCache([20])) for _ in range(2)]
    assert torch.equal(ours.embed_tokens, before)
    assert torch.equal(*forward)


def test_packed_sequences_do_not_see_each_other(variant):
    ours, hf = variant("gqa")
    lens = [1, 5, 6, 4, 17]
    sequences = [torch.randint(0, 259, (length,)) for length in lens]
    positions = torch.cat([torch.arange(length) for length in lens])
    logits = ours.logits(ours.forward(torch.cat(sequences), positions, OneShotCache(lens)))
    for sequence, rows in zip(sequences, logits.split(lens), strict=True):
        close(rows, hf(sequence[None]).logits[0])


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 17, 100])
@pytest.mark.parametrize("bias", [None, torch.linspace(-3, 3, 96)])
def test_linear_is_the_same_product_with_a_plain_and_with_a_packed_matrix(rows, bias):
    x, weight = torch.randn(rows, 64), torch.randn(96, 64)
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    for matrix in (weight, pack(weight)):
        out = linear(x, matrix, bias)
        assert out.shape == (rows, 96)
        torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=0)


def test_a_matrix_is_packed_in_float32_only_and_where_onednn_is(monkeypatch):
    weight = torch.randn(96, 64)
    assert pack(weight).is_mkldnn == torch.backends.mkldnn.is_available()
    assert pack(weight.bfloat16()).layout is torch.strided
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        assert pack(weight) is weight
    for operator in ("_linear_pointwise", "_reorder_linear_weight"):
        with monkeypatch.context() as patch:
            ops = types.SimpleNamespace(_linear_pointwise=None, _reorder_linear_weight=None)
            delattr(ops, operator)
            patch.setattr("common.llama.torch.ops", types.SimpleNamespace(mkldnn=ops))
            assert pack(weight) is weight


def test_packed_and_plain_matrices_give_the_same_logits_and_greedy_tokens(tmp_path):
    tiny_llama(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    packed = Llama.from_folder(tmp_path, CPU, torch.float32)
    plain = Llama(config, load_weights(tmp_path, config, CPU, torch.float32))
    if torch.backends.mkldnn.is_available():
        assert packed.lm_head.is_mkldnn  # or nothing would be compared
        assert packed.layers[1].down_proj.is_mkldnn
    assert not plain.lm_head.is_mkldnn
    sequences = [torch.tensor([1, 5, 9]), torch.tensor([1, 5, 9])]
    for _ in range(20):
        logits = []
        for i, model in enumerate((packed, plain)):
            length = len(sequences[i])
            hidden = model.forward(sequences[i], torch.arange(length), OneShotCache([length]))
            logits.append(model.logits(hidden))
            sequences[i] = torch.cat([sequences[i], logits[i][-1:].argmax(-1)])
        close(*logits)
        assert torch.equal(*sequences)


@pytest.mark.real_model
@pytest.mark.parametrize(
    "text", ["Why is the sky blue?", "def add(a, b):\n    return", "Das Wetter ist heute 中文 🙂 " * 4]
)
def test_logits_of_the_real_model_equal_transformers_at_5e_4(real, text):
    """How far both are from float64 is measured by `v0_1_single_request.bench`."""
    ours, tokenizer = real.ready["model"], real.ready["tokenizer"]
    assert ours.config == ModelConfig.from_folder(real.folder)
    ids = torch.tensor(tokenizer.chat_token_ids([{"role": "user", "content": text}]))
    logits = ours.logits(ours.forward(ids, torch.arange(len(ids)), OneShotCache([len(ids)])))
    torch.testing.assert_close(logits, real.hf(ids[None]).logits[0], atol=5e-4, rtol=0)
