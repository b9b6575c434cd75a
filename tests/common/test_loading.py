"""How long the context is when nobody says, and which rows may be sampled."""

import pytest

from common.errors import ModelError
from common.loading import context_length, load, num_sampled_rows
from tests.kit.models import ScriptModel
from tests.kit.tokenizers import byte_tokenizer


@pytest.mark.parametrize(("num_kv_tokens", "length"), [(1023, 1023), (1024, 1024), (5000, 1024)])
def test_the_context_unset_is_the_smaller_of_the_models_and_what_memory_holds(num_kv_tokens, length):
    assert context_length(None, ScriptModel([65], 1), num_kv_tokens) == length


def test_the_context_as_asked_may_pass_memory_but_not_the_model():
    assert context_length(800, ScriptModel([65], 1), num_kv_tokens=10) == 800
    with pytest.raises(ModelError, match="from 2 to the model's own 1024, got 1025"):
        context_length(1025, ScriptModel([65], 1), num_kv_tokens=10)


@pytest.mark.parametrize(("head_rows", "sampled"), [(272, 259), (257, 257)])
def test_a_row_is_sampled_only_if_model_and_tokenizer_know_it(head_rows, sampled):
    assert num_sampled_rows(ScriptModel([65], 1, vocab_size=head_rows), byte_tokenizer()) == sampled


def test_a_ready_model_is_taken_as_it_is_whatever_device_and_dtype_say():
    model, tokenizer = ScriptModel([65], 1), byte_tokenizer()
    assert load(model, tokenizer, device="auto", dtype="bfloat16") == (model, tokenizer)
