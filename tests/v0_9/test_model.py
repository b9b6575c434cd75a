"""The model on the kernels against `common.llama.Llama`, its control, and against transformers."""

import math

import pytest
import torch

from common import loading
from common.config import ModelConfig
from common.llama import Llama
from common.weights import load_weights
from tests.common.test_llama import VARIANTS
from tests.kit.checkpoints import tiny_llama
from tests.kit.models import OneShotCache
from v0_9_fast import loader
from v0_9_fast.engine_args import EngineArgs
from v0_9_fast.kernels import bindings
from v0_9_fast.matrices import Matrix

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def plain_weights(folder):
    config = ModelConfig.from_folder(folder)
    return config, load_weights(folder, config, CPU, torch.float32)


def fast(folder, **args):
    return loader.pack(*plain_weights(folder), bindings.load(), EngineArgs(**args))


@pytest.mark.parametrize("linear_backend", ["c", "onednn"])
@pytest.mark.parametrize("name", VARIANTS)
def test_each_layer_and_the_logits_equal_the_plain_models_and_transformers(kernels, tmp_path, name, linear_backend):
    hf = tiny_llama(tmp_path, **VARIANTS[name])
    ours, plain = fast(tmp_path, linear_backend=linear_backend), Llama.from_folder(tmp_path, CPU, torch.float32)
    token_ids, positions = torch.randint(0, 256, (19,)), torch.arange(19)
    for num_layers in (1, 2):
        hidden = [
            model.forward(token_ids, positions, OneShotCache([19]), num_layers=num_layers) for model in (ours, plain)
        ]
        torch.testing.assert_close(*hidden, atol=1e-4, rtol=0)
    torch.testing.assert_close(ours.logits(hidden[0]), hf(token_ids[None]).logits[0], atol=1e-4, rtol=0)


def test_picked_rows_are_those_of_all_rows(kernels, tmp_path):
    tiny_llama(tmp_path)
    model = fast(tmp_path, linear_backend="c")
    token_ids, positions, rows = torch.randint(0, 256, (19,)), torch.arange(19), torch.tensor([3, 18, 3])
    whole = model.forward(token_ids, positions, OneShotCache([19]))
    assert torch.equal(model.forward(token_ids, positions, OneShotCache([19]), rows=rows), whole[rows])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_weights_give_what_the_rounded_weights_give_in_float32(kernels, tmp_path, dtype):
    tiny_llama(tmp_path)
    ours, plain = fast(tmp_path, weights_dtype=dtype), Llama.from_folder(tmp_path, CPU, torch.float32)
    config, weights = plain_weights(tmp_path)
    for name, weight in weights.items():
        if weight.ndim == 2 and name != "embed_tokens":  # looked up, not multiplied: kept whole
            weights[name] = weight.to(loading.DTYPES[dtype]).float()
    rounded = Llama(config, weights)
    token_ids, positions = torch.randint(0, 256, (19,)), torch.arange(19)
    hidden = [model.forward(token_ids, positions, OneShotCache([19])) for model in (ours, rounded, plain)]
    torch.testing.assert_close(hidden[0], hidden[1], atol=1e-4, rtol=0)
    assert (hidden[0] - hidden[2]).abs().max() > 1e-3  # so that the test would notice weights that are not rounded
    torch.testing.assert_close(ours.logits(hidden[0]), rounded.logits(hidden[1]), atol=1e-4, rtol=0)


def test_a_matrix_keeps_only_the_copies_that_it_uses_and_takes_each_for_its_rows(kernels):
    weight, bias = torch.randn(33, 20), torch.randn(33)
    ours, both, theirs = (Matrix.packed(kernels, weight, bias, torch.float32, most) for most in (math.inf, 4, 0))
    assert (ours.reordered, theirs.panels) == (None, None)
    assert both.panels is not None
    assert both.reordered is not None
    for num_rows in (1, 4, 5, 30):
        x = torch.randn(num_rows, 20)
        expected = (x.double() @ weight.double().T + bias).float()
        for matrix in (ours, both, theirs):
            torch.testing.assert_close(matrix.product(x), expected, atol=1e-4, rtol=0)
            residual = torch.ones(num_rows, 33)
            matrix.product(x, add_to=residual)
            torch.testing.assert_close(residual, expected + 1, atol=1e-4, rtol=0)
    broken = Matrix(kernels, 33, None, torch.zeros_like(both.panels), both.reordered, 4)
    assert broken.product(torch.ones(4, 20)).eq(0).all()
    assert broken.product(torch.ones(5, 20)).ne(0).any()


def test_packing_frees_the_plain_weights_as_it_goes(kernels, tmp_path):
    tiny_llama(tmp_path)
    config, weights = plain_weights(tmp_path)
    loader.pack(config, weights, kernels, EngineArgs(linear_backend="c"))
    assert weights == {}
