"""What callers may ask, and how they are told what is wrong; a refused request changes nothing."""

import pytest

from common.errors import ModelError, RequestError
from common.sampling_params import SamplingParams
from tests.kit.checkpoints import tiny_llama
from tests.kit.models import ScriptModel
from tests.kit.tokenizers import BOS, EOS, byte_tokenizer, save_byte_tokenizer

SINCE = "v0_1"
SHORT = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


def test_text_and_token_ids_one_and_many_are_all_prompts(load, tiny):
    llm = load(tiny)
    expected = tiny.tokens([72, 105], 3)
    for prompts in ("Hi", [72, 105], ["Hi"], [[72, 105]], ("Hi",)):
        [output] = llm.generate(prompts, SHORT)
        assert output.outputs[0].token_ids == expected
        assert output.prompt_token_ids == [72, 105]
    assert llm.generate("Hi", SHORT)[0].prompt == "Hi"
    assert llm.generate([72, 105], SHORT)[0].prompt is None


def test_sch_11_no_prompts_give_no_outputs_and_the_same_prompt_twice_gives_two(load, tiny):
    llm = load(tiny)
    assert llm.generate([], SHORT) == []
    first, second = llm.generate(["Hi", "Hi"], SHORT)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert first.request_id != second.request_id


def test_results_come_in_input_order_each_with_its_own_parameters(load, tiny):
    llm = load(tiny)
    params = [SamplingParams(temperature=0.0, max_tokens=num, ignore_eos=True) for num in (9, 2, 5)]
    outputs = llm.generate(["one", "two", "three"], params)
    assert [output.prompt for output in outputs] == ["one", "two", "three"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 2, 5]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "prompt is empty"),
        ([""], "prompt is empty"),
        ([[-1]], "-1, which is out of vocabulary"),
        ([[999999]], "999999, which is out of vocabulary"),
        ([["Hi"]], "text or a list of token ids"),
        ([None], "text or a list of token ids"),
        ([[True, 2]], "text or a list of token ids"),
        (5, "prompts must be text"),
        ({"prompt": "Hi"}, "prompts must be text"),
    ],
)
def test_a_bad_prompt_is_refused_in_one_sentence(load, tiny, prompts, message):
    with pytest.raises(RequestError, match=message):
        load(tiny).generate(prompts, SHORT)


def test_api_10_an_empty_text_is_the_bos_where_the_tokenizer_adds_one(milestone):
    llm = milestone.LLM(ScriptModel([65, EOS], prompt_len=1), tokenizer=byte_tokenizer(add_bos=True))
    [output] = llm.generate([""], SHORT)
    assert output.prompt_token_ids == [BOS]


def test_a_refused_batch_leaves_the_engines_seeds_and_ids_as_they_were(milestone, tiny):
    sampled = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    untouched, refused = milestone.LLM(tiny.folder, seed=1), milestone.LLM(tiny.folder, seed=1)
    with pytest.raises(RequestError):
        refused.generate(["good", [-1]], sampled)
    [expected], [output] = untouched.generate(["Hi"], sampled), refused.generate(["Hi"], sampled)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.request_id == expected.request_id


def test_text_whose_tokens_the_model_has_no_embedding_for_is_refused(milestone):
    # BYTE-TOK's <eot> is 258: an added token that the embedding was not enlarged for.
    llm = milestone.LLM(ScriptModel([65], prompt_len=3, vocab_size=257), tokenizer=byte_tokenizer())
    with pytest.raises(RequestError, match="258, which is out of vocabulary"):
        llm.generate("a<eot>b", SHORT)


def test_one_bad_prompt_is_told_before_any_other_has_run(milestone):
    model = ScriptModel([65, 66, 67], prompt_len=2)
    llm = milestone.LLM(model, tokenizer=byte_tokenizer())
    num_before = model.num_forwards
    with pytest.raises(ValueError, match="out of vocabulary"):
        llm.generate(["Hi", [-1]], SHORT)
    assert model.num_forwards == num_before
    assert llm.generate(["Hi"], SHORT)[0].outputs[0].text == "ABC"


@pytest.mark.parametrize(
    ("params", "message"),
    [({"stop_token_ids": [999999]}, "stop_token_ids has token id 999999"), ({"logit_bias": {300: 1.0}}, "logit_bias")],
)
def test_api_9_ids_outside_the_vocabulary_are_refused_in_parameters_too(load, tiny, params, message):
    with pytest.raises(RequestError, match=message):
        load(tiny).generate(["Hi"], SamplingParams(**params))


def test_prompt_logprobs_are_computed_from_v0_4_on_and_refused_before(milestone, load, tiny):
    llm, params = load(tiny), SamplingParams(prompt_logprobs=0, max_tokens=1)
    if milestone.__name__.startswith(("v0_1_", "v0_2_", "v0_3_")):
        for ask in (llm.generate, llm.stream):
            with pytest.raises(RequestError, match=r"prompt_logprobs works from v0\.4 on") as error:
                ask([72, 105], params)
            assert error.value.param == "prompt_logprobs"
    else:
        assert len(llm.generate([72, 105], params)[0].prompt_logprobs) == 2


def test_stream_refuses_at_the_call_not_at_the_first_step(load, tiny):
    with pytest.raises(RequestError, match="out of vocabulary"):
        load(tiny).stream([-1], SHORT)
    with pytest.raises(RequestError, match="must be SamplingParams"):
        load(tiny).stream("Hi", {"max_tokens": 1})


def test_a_stream_that_is_left_early_disturbs_nothing(load, tiny):
    llm = load(tiny)
    stream = llm.stream("Hi", SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    assert llm.generate("Hi", SHORT)[0].outputs[0].token_ids == tiny.tokens([72, 105], 3)


def test_tpl_1_a_chat_prompt_has_exactly_one_bos(milestone):
    tokenizer = byte_tokenizer(add_bos=True)
    messages = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.chat_token_ids(messages)
    llm = milestone.LLM(ScriptModel([65, EOS], prompt_len=len(prompt)), tokenizer=tokenizer)
    [output] = llm.chat(messages, SamplingParams(temperature=0.0))
    assert output.prompt_token_ids == prompt
    assert output.prompt_token_ids.count(BOS) == 1
    assert output.outputs[0].text == "A"
    # Token ids get nothing added, and a list of conversations gives a list of answers.
    assert llm.generate([prompt], SHORT)[0].prompt_token_ids == prompt
    assert len(llm.chat([messages, messages], SamplingParams(temperature=0.0))) == 2


def test_tpl_2_a_model_without_a_template_refuses_chats_and_completes_text(milestone):
    llm = milestone.LLM(ScriptModel([65], prompt_len=2), tokenizer=byte_tokenizer(chat_template=None))
    with pytest.raises(RequestError, match="chat template"):
        llm.chat([{"role": "user", "content": "Hi"}])
    assert llm.generate("Hi", SHORT)[0].outputs[0].text == "AAA"


@pytest.mark.parametrize("messages", [[], {"role": "user", "content": "Hi"}, "hello", 5, None, [[]], ["hello"]])
def test_tpl_8_a_chat_without_messages_is_refused(load, tiny, messages):
    with pytest.raises(RequestError) as error:
        load(tiny).chat(messages)
    assert error.value.param == "messages"


def test_engine_arguments_that_cannot_be_are_refused(milestone, tiny):
    for arguments, message in (
        ({"max_model_len": 1000}, "own 512, got 1000"),
        ({"max_model_len": 1}, "must be from 2"),
        ({"max_model_len": "64"}, "must be from 2 .* got '64'"),
        ({"max_model_len": 64.5}, "must be from 2"),
        ({"device": "tpu"}, "no device 'tpu'"),
        ({"dtype": "int8"}, "no dtype 'int8'"),
        ({"attention_backend": "magic"}, "no attention back end 'magic'"),
    ):
        with pytest.raises(ModelError, match=message):
            milestone.LLM(tiny.folder, **arguments)
    with pytest.raises(ModelError, match="needs its tokenizer"):
        milestone.LLM(ScriptModel([65], prompt_len=1))
    with pytest.raises(TypeError):
        milestone.LLM(tiny.folder, no_such_flag=1)


def test_a_tokenizer_that_is_passed_replaces_the_folders(milestone, tiny):
    llm = milestone.LLM(tiny.folder, tokenizer=byte_tokenizer(add_bos=True))
    assert llm.generate("Hi", SHORT)[0].prompt_token_ids == [BOS, 72, 105]


def test_bfloat16_runs_and_begins_like_float32(milestone, tiny):
    llm = milestone.LLM(tiny.folder, dtype="bfloat16")
    [output] = llm.generate([[10, 20, 30, 40]], SHORT)
    assert output.outputs[0].token_ids[0] == tiny.tokens([10, 20, 30, 40], 1)[0]


def test_mdl_5_a_model_with_its_own_head_dim_runs_in_the_cache(milestone, tmp_path):
    from tests.kit.models import reference_tokens

    hf = tiny_llama(tmp_path, head_dim=32, attention_bias=True, mlp_bias=True)
    save_byte_tokenizer(tmp_path)
    [output] = milestone.LLM(tmp_path).generate([[1, 2, 3]], SamplingParams(temperature=0.0, ignore_eos=True))
    assert output.outputs[0].token_ids == reference_tokens(hf, [1, 2, 3], 16)
