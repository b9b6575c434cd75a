"""How a request ends, and what its text holds: end tokens, stop strings, lengths."""

import pytest

from common.errors import RequestError
from common.sampling_params import SamplingParams
from tests.kit.models import ScriptModel
from tests.kit.tokenizers import EOS, EOT, byte_tokenizer

SINCE = "v0_1"


def greedy(**params):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 50} | params)


def answer(llm, params, prompt="Hi"):
    """The whole answer, after checking that the streamed one is the same."""
    [output] = llm.generate([prompt], params)
    whole = output.outputs[0]
    deltas = [output.outputs[0] for output in llm.stream(prompt, params)]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token_id for delta in deltas for token_id in delta.token_ids] == whole.token_ids
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (whole.finish_reason, whole.stop_reason)
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    return whole


def test_det_1_split_characters_are_held_back_until_complete(script_llm):
    llm = script_llm([240, 159, 153, 130, 32, 228, 184, 173, 195, 169, EOS])
    deltas = [output.outputs[0].text for output in llm.stream("Hi", greedy())]
    assert deltas == ["", "", "", "🙂", " ", "", "", "中", "", "é", ""]
    assert answer(llm, greedy()).text == "🙂 中é"


def test_an_unfinished_character_at_the_end_is_dropped_streamed_and_whole(script_llm):
    assert answer(script_llm([104, 105, 240, 159, 153, 130]), greedy(max_tokens=4)).text == "hi"


def test_det_5_the_end_token_is_counted_but_not_shown(script_llm):
    llm = script_llm([72, 105, 46, EOT])
    whole = answer(llm, greedy())
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("Hi.", "stop", EOT)
    assert whole.token_ids == [72, 105, 46, EOT]
    assert answer(llm, greedy(skip_special_tokens=False)).text == "Hi."
    shown = greedy(skip_special_tokens=False, include_stop_str_in_output=True)
    assert answer(llm, shown).text == "Hi.<eot>"


def test_eos_1_every_listed_end_token_stops_and_only_the_first_has_no_stop_reason(script_llm):
    for end, reason in ((EOS, None), (EOT, EOT)):
        whole = answer(script_llm([65, end, 66]), greedy())
        assert (whole.text, whole.finish_reason, whole.stop_reason) == ("A", "stop", reason)


def test_eos_1_the_tokenizers_end_token_is_the_primary_one_wherever_the_model_lists_it(script_llm):
    llm = script_llm([65, EOS], eos_token_ids=(EOT, EOS))
    assert answer(llm, greedy()).stop_reason is None


def test_stp_1_no_character_of_a_stop_string_over_several_tokens_is_shown(script_llm):
    llm = script_llm([*b"xyDEFGHIJ", 33])
    deltas = [output.outputs[0].text for output in llm.stream("Hi", greedy(stop="DEFGHIJ"))]
    assert "".join(deltas) == "xy"
    whole = answer(llm, greedy(stop="DEFGHIJ"))
    assert (whole.finish_reason, whole.stop_reason, len(whole.token_ids)) == ("stop", "DEFGHIJ", 9)


def test_stp_3_text_held_back_is_shown_when_the_request_ends_otherwise(script_llm):
    llm = script_llm([*b"UNO DUE TRE", EOS])
    assert answer(llm, greedy(stop=["TRE\nAAAAAAAA"])).text == "UNO DUE TRE"
    assert answer(llm, greedy(stop=["TRE\nAAAAAAAA"], max_tokens=10)).text == "UNO DUE TR"


def test_stp_5_a_stop_string_is_kept_on_request_and_nothing_after_it(script_llm):
    llm = script_llm(list(b"abcSTOPxyz"))
    assert answer(llm, greedy(stop="STOP")).text == "abc"
    assert answer(llm, greedy(stop="STOP", include_stop_str_in_output=True)).text == "abcSTOP"


def test_stp_9_stop_token_ids_work_by_id_whatever_the_text(script_llm):
    llm = script_llm([65, 66, 67, EOT])
    for skip in (True, False):
        whole = answer(llm, greedy(stop=["<eot>"], stop_token_ids=[66], skip_special_tokens=skip))
        assert (whole.text, whole.finish_reason, whole.stop_reason) == ("A", "stop", 66)


def test_len_8_min_tokens_masks_every_end_token(script_llm):
    llm = script_llm([65, EOT, EOS, 66, 67, EOT], runner_up=120)
    whole = answer(llm, greedy(min_tokens=4))
    assert whole.token_ids == [65, 120, 120, 66, 67, EOT]
    assert whole.text == "AxxBC"


def test_len_8_min_tokens_keeps_stop_strings_and_stop_token_ids_from_ending_early(script_llm):
    llm = script_llm(list(b"abcdefgh"), runner_up=120)
    assert answer(llm, greedy(min_tokens=4, stop=["b"], max_tokens=8)).text == "abcdefgh"
    assert answer(llm, greedy(min_tokens=4, stop_token_ids=[98, 103])).text == "axcdef"


def test_len_8_ignore_eos_runs_to_max_tokens_without_special_text(script_llm):
    whole = answer(script_llm([65, EOT, 66, EOS, 67, 68]), greedy(ignore_eos=True, max_tokens=6))
    assert (whole.text, whole.finish_reason, len(whole.token_ids)) == ("ABCD", "length", 6)


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_max_tokens_is_exact_and_ends_with_length(script_llm, max_tokens):
    whole = answer(script_llm([65, 66, 67, 68, 69, 70]), greedy(max_tokens=max_tokens))
    assert (len(whole.token_ids), whole.finish_reason, whole.stop_reason) == (max_tokens, "length", None)


def test_len_1_no_max_tokens_runs_to_the_end_of_the_context(script_llm):
    llm = script_llm([65], prompt="12345678", max_model_len=20)
    assert len(answer(llm, greedy(max_tokens=None), prompt="12345678").token_ids) == 12


def test_len_3_a_prompt_that_does_not_fit_is_refused_with_both_numbers(script_llm):
    llm = script_llm([65], max_model_len=64)
    for length in (64, 65):
        with pytest.raises(RequestError, match=rf"prompt has {length} tokens.*holds 64 tokens") as error:
            llm.generate([[65] * length], greedy(max_tokens=1))
        assert error.value.code == "context_length_exceeded"
    assert len(llm.generate([[65] * 63], greedy(max_tokens=1))[0].outputs[0].token_ids) == 1


def test_len_5_prompt_and_max_tokens_over_the_context_are_refused_with_the_true_numbers(script_llm):
    llm = script_llm([65], max_model_len=64)
    with pytest.raises(RequestError, match=r"8 tokens and max_tokens asks for 60 more: together 68.*holds 64"):
        llm.generate([[65] * 8], greedy(max_tokens=60))


def test_smp_9_rows_of_the_output_head_without_a_token_are_never_sampled(milestone):
    llm = milestone.LLM(ScriptModel([270, 271], prompt_len=2, runner_up=120), tokenizer=byte_tokenizer())
    assert answer(llm, greedy(max_tokens=2)).text == "xx"
    # Nearly uniform, so that a padded row would be drawn sooner or later.
    [output] = llm.generate(["Hi"], SamplingParams(temperature=2.0, max_tokens=500, ignore_eos=True, seed=1))
    assert max(output.outputs[0].token_ids) < 259
