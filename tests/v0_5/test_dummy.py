"""`--load-format dummy`: a shape without weights, by the folder of its config.json or by the name of a bundled one."""

import json

import pytest

from common.config import ModelConfig, RopeConfig
from common.errors import ModelError
from common.weights import expected_shapes
from tests.kit.checkpoints import TINY
from v0_5_bench import LLM, SamplingParams, generate
from v0_5_bench.engine_args import SHAPES, EngineArgs, shape_folder

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1, 2, 3], list(range(40)), [7]]
SMALL = {"load_format": "dummy", "num_blocks": 40}


def answers(model, prompts=PROMPTS, **options):
    outputs = LLM(model, **SMALL | options).generate(prompts, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | TINY))
    return tmp_path


def test_the_same_tokens_twice_alone_and_batched(folder):
    first = answers(folder)
    assert first == answers(str(folder))
    assert first == [answers(folder, prompts=[prompt])[0] for prompt in PROMPTS]
    assert len({tuple(token_ids) for token_ids in first}) == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_run(folder, dtype):
    assert [len(token_ids) for token_ids in answers(folder, dtype=dtype)] == [12, 12, 12]


def test_the_text_is_the_ids(folder):
    [output] = LLM(folder, **SMALL).generate([[5]], GREEDY, use_tqdm=False)
    assert output.outputs[0].text == "".join(f"<{token_id}>" for token_id in output.outputs[0].token_ids)


def test_a_bundled_shape_goes_by_its_name():
    assert len(answers("tiny")[0]) == 12


def test_a_folder_of_the_same_name_goes_first(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "tiny").mkdir()
    assert shape_folder("tiny") == "tiny"
    assert shape_folder("llama-3.1-8b") == SHAPES / "llama-3.1-8b"


@pytest.mark.parametrize("model", [None, "org/name", "./tiny", SHAPES, ""])
def test_whatever_else_a_model_can_be_is_left_to_the_loader(model):
    assert shape_folder(model) == model


def test_an_unknown_name_is_told_with_those_there_are():
    with pytest.raises(ModelError) as caught:
        LLM("llama-4", **SMALL)
    assert str(caught.value) == (
        "There is no folder llama-4, and no bundled shape of that name: load_format dummy takes llama-3.1-8b, tiny, "
        "or whatever else --model takes."
    )


def test_without_the_flag_a_shape_is_no_model():
    with pytest.raises(ModelError, match="There is no folder tiny"):
        LLM("tiny")
    assert EngineArgs().load_format == "auto"


def test_the_shape_of_llama_3_1_8b_is_the_published_one():
    config = ModelConfig.from_folder(SHAPES / "llama-3.1-8b")
    num_parameters = sum(
        rows * columns for rows, columns in ((*shape, 1)[:2] for shape in expected_shapes(config).values())
    )
    assert num_parameters == 8_030_261_248  # as the hub says of meta-llama/Llama-3.1-8B
    assert config.rope == RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    assert config.kv_elements_per_token * 2 == 128 * 1024  # bytes in bfloat16
    assert (config.max_position_embeddings, config.rms_norm_eps) == (131072, 1e-5)
    assert config.eos_token_ids == (128001, 128008, 128009)


def test_the_command_line_refuses_text_for_a_shape(capsys):
    assert generate.main(["--model", "tiny", "--load-format", "dummy", "--num-blocks", "8", "--raw", "Hi"]) == 1
    assert capsys.readouterr().err.endswith("give the prompt as token ids.\n")


def test_the_command_line_knows_the_formats(capsys):
    with pytest.raises(SystemExit):
        generate.main(["--load-format", "pickle", "Hi"])
    assert "--load-format" in capsys.readouterr().err


def test_the_server_takes_token_ids_and_refuses_text(serve):
    with serve("tiny", **SMALL) as server:
        [choice] = server.complete(prompt=[1, 2, 3], max_tokens=5, ignore_eos=True).json()["choices"]
        assert choice["text"].count("<") == 5
        for answer in (server.complete(), server.chat()):
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].endswith("give the prompt as token ids.")
