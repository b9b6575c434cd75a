"""The flags of speculative decoding: what cannot be is refused in a sentence, when the engine is made."""

import argparse
import importlib

import pytest

from common import cli
from common.errors import ModelError
from common.sampling_params import SamplingParams
from tests.kit.checkpoints import tiny_llama
from tests.kit.drafters import options
from tests.kit.models import ScriptModel
from tests.kit.tokenizers import byte_tokenizer, save_byte_tokenizer

SINCE = "v0_7"

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"speculative_method": "eagle"},
            "speculative_method must be one of ngram, early_exit, draft_model, got 'eagle'.",
        ),
        ({"speculative_method": ""}, "speculative_method must be one of ngram, early_exit, draft_model, got ''."),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1, got 0"),
        ({"num_speculative_tokens": "4"}, "num_speculative_tokens must be at least 1, got '4'"),
        ({"ngram_min": 0}, "ngram_min must be at least 1, got 0"),
        ({"ngram_max": -1}, "ngram_max must be at least 1, got -1"),
        ({"ngram_min": 5, "ngram_max": 4}, "ngram_min (5) must not be above ngram_max (4)."),
        ({"ngram_min": 5}, "ngram_min (5) must not be above ngram_max (4)."),
        ({"exit_layer": 1}, "exit_layer needs speculative_method early_exit."),
        ({"exit_layer": 1, "speculative_method": "ngram"}, "exit_layer needs speculative_method early_exit."),
        ({"exit_layer": 0, "speculative_method": "early_exit"}, "exit_layer must be at least 1, got 0"),
        (
            {"exit_layer": 2, "speculative_method": "early_exit"},
            "exit_layer must be below the model's 2 layers, got 2.",
        ),
        ({"draft_model": "folder"}, "draft_model needs speculative_method draft_model."),
        (
            {"draft_model": "folder", "speculative_method": "early_exit"},
            "draft_model needs speculative_method draft_model.",
        ),
        (
            {"speculative_method": "draft_model"},
            "speculative_method draft_model needs draft_model, the model that guesses.",
        ),
        ({"speculative_disable_below": -0.1}, "speculative_disable_below must be from 0 to 1, got -0.1."),
        ({"speculative_disable_below": 1.5}, "speculative_disable_below must be from 0 to 1, got 1.5."),
        ({"speculative_disable_below": float("nan")}, "speculative_disable_below must be from 0 to 1, got nan."),
    ],
)
def test_flags_of_speculation_that_cannot_be_are_refused_in_a_sentence(milestone, tiny, flags, message):
    with pytest.raises(ModelError) as error:
        milestone.LLM(**tiny.ready, **flags)
    assert str(error.value).startswith(message)


def test_early_exit_is_refused_for_a_model_without_layers_that_it_can_count(milestone):
    with pytest.raises(ModelError, match="early_exit needs a Llama, whose layers can be counted"):
        milestone.LLM(ScriptModel([65], 2), tokenizer=byte_tokenizer(), speculative_method="early_exit")


def test_early_exit_is_refused_for_a_model_of_one_layer(milestone, tmp_path):
    tiny_llama(tmp_path, num_hidden_layers=1)
    save_byte_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="exit_layer must be below the model's 1 layers, got 1"):
        milestone.LLM(tmp_path, speculative_method="early_exit")


def test_early_exit_leaves_after_a_third_of_the_layers_unless_told_otherwise(milestone, tmp_path):
    tiny_llama(tmp_path, num_hidden_layers=7)
    save_byte_tokenizer(tmp_path)
    assert milestone.LLM(tmp_path, speculative_method="early_exit").engine.model_runner.drafter.exit_layer == 2


def test_without_a_method_nothing_is_drafted_whatever_the_number(milestone, tiny):
    engine = milestone.LLM(**tiny.ready, num_speculative_tokens=8, ngram_min=1).engine
    assert (engine.model_runner.drafter, engine.scheduler.num_speculative_tokens) == (None, 0)


def test_a_draft_model_with_another_vocabulary_is_refused(milestone, tiny, tmp_path):
    tiny_llama(tmp_path, num_hidden_layers=1)
    save_byte_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("<eot>", "<end>"))
    with pytest.raises(ModelError, match=r"draft_model .* has another vocabulary than the model"):
        milestone.LLM(**tiny.ready, speculative_method="draft_model", draft_model=str(tmp_path))


def test_a_draft_model_with_a_shorter_context_is_refused_unless_the_models_is_cut_to_it(milestone, tiny, tmp_path):
    tiny_llama(tmp_path, num_hidden_layers=1, max_position_embeddings=128, vocab_size=259)
    save_byte_tokenizer(tmp_path)
    flags = {"speculative_method": "draft_model", "draft_model": str(tmp_path)}
    for max_model_len in (None, 129):
        with pytest.raises(ModelError, match=r"trained for 128 tokens, the model serves \d+: set max_model_len to 128"):
            milestone.LLM(**tiny.ready, max_model_len=max_model_len, **flags)
    [output] = milestone.LLM(**tiny.ready, max_model_len=128, **flags).generate([[1, 2]], GREEDY)
    assert output.outputs[0].token_ids == tiny.tokens([1, 2], 12)


def test_a_draft_model_that_is_not_there_is_refused(milestone, tiny, tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        milestone.LLM(**tiny.ready, speculative_method="draft_model", draft_model=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("sizes", [(259, 272), (272, 259)])
def test_a_draft_model_may_have_more_or_fewer_rows_to_spare_than_the_model(milestone, tmp_path, sizes):
    """Token 265 is in a prompt, though no tokenizer has it: a row of the larger model, and none of the smaller."""
    for name, size in zip(("draft", "model"), sizes, strict=True):
        tiny_llama(tmp_path / name, vocab_size=size)
        save_byte_tokenizer(tmp_path / name)
    prompts = [[1, 2, 3], [1, 265 if sizes[1] > 265 else 5, 2]]
    plain = milestone.LLM(tmp_path / "model", num_blocks=20).generate(prompts, GREEDY)
    llm = milestone.LLM(
        tmp_path / "model", num_blocks=20, speculative_method="draft_model", draft_model=str(tmp_path / "draft")
    )
    outputs = llm.generate(prompts, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]


def test_a_draft_models_pool_has_the_same_blocks_and_shares_the_memory(milestone, tiny):
    plain = milestone.LLM(**tiny.ready, kv_cache_memory="1MiB").engine
    engine = milestone.LLM(**tiny.ready, kv_cache_memory="1MiB", **options("itself", tiny)).engine
    own, its = engine.model_runner.kv_cache.kv, engine.model_runner.drafter.kv_cache.kv
    assert own.shape == its.shape
    assert own.data_ptr() != its.data_ptr()
    assert own.nbytes + its.nbytes <= 2**20 < 2 * plain.model_runner.kv_cache.kv.nbytes
    assert engine.pool.num_blocks == own.shape[2] == plain.pool.num_blocks // 2


def test_flags_of_speculation_are_read_from_the_command_line(milestone):
    args = importlib.import_module(f"{milestone.__name__}.engine_args").EngineArgs
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser, args, title="engine")
    line = (
        "--speculative-method early_exit --num-speculative-tokens 6 --exit-layer 3 --ngram-min 1 --ngram-max 3 "
        "--speculative-disable-below 0.25"
    )
    read = cli.from_arguments(args, parser.parse_args(line.split()))
    assert (read.speculative_method, read.num_speculative_tokens, read.exit_layer) == ("early_exit", 6, 3)
    assert (read.ngram_min, read.ngram_max, read.speculative_disable_below) == (1, 3, 0.25)
    line = "--speculative-method draft_model --draft-model folder"
    assert cli.from_arguments(args, parser.parse_args(line.split())).draft_model == "folder"
    with pytest.raises(SystemExit):
        parser.parse_args(["--speculative-method", "eagle"])
