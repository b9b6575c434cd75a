"""A prompt's own log-probabilities: those of transformers, however the prompt was cut, batched or computed again."""

import math

import pytest
import torch

from common import scoring
from common.errors import RequestError
from common.sampling_params import SamplingParams
from tests.kit.models import Successor
from tests.kit.tokenizers import EOS, byte_tokenizer

SINCE = "v0_4"

PROMPTS = [[(13 * i + 7 * n + n * n) % 256 for i in range(n)] for n in (1, 2, 5, 16, 17, 33, 100)]


def scored(num=3, **params):
    return SamplingParams(temperature=0.0, ignore_eos=True, **{"prompt_logprobs": num, "max_tokens": 2} | params)


@torch.inference_mode()
def reference(hf, prompt, vocab_size):
    """`[vocab_size]` for each token but the last: what comes after it. All of them at once would be 100 MB and more."""
    [hidden] = hf.model(torch.tensor([prompt])).last_hidden_state
    for rows in hidden[:-1].split(64):
        yield from hf.lm_head(rows)[:, :vocab_size].log_softmax(dim=-1)


def assert_scores(output, hf, num, tokenizer):
    prompt, entries = output.prompt_token_ids, output.prompt_logprobs
    assert len(entries) == len(prompt)
    assert entries[0] is None
    expected = reference(hf, prompt, tokenizer.vocab_size)
    for row, token_id, entry in zip(expected, prompt[1:], entries[1:], strict=True):
        assert next(iter(entry)) == token_id
        assert set(entry) == {token_id, *row.topk(num).indices.tolist()}
        for candidate, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(row[candidate]), abs=1e-4)
            assert logprob.rank == int((row > row[candidate]).sum()) + 1
            assert logprob.decoded_token == tokenizer.token_text(candidate)


def count_rows(model, monkeypatch):
    """The numbers of rows of logits that are asked of a model, as they are asked."""
    logits, counts = model.logits, []

    def counting(hidden):
        counts.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(model, "logits", counting)
    return counts


def preempt_all(scheduler):
    while scheduler.running:
        newest = scheduler.running[-1]
        scheduler._preempt_newest(*([newest] if hasattr(scheduler, "events") else []))  # from v0.8 on: for whom


@pytest.mark.parametrize("num", [0, 1, 5])
@pytest.mark.parametrize("budget", [8, 16, 512])
def test_prompt_logprobs_equal_transformers_batched_and_in_any_chunks(milestone, tiny, budget, num):
    llm = milestone.LLM(tiny.folder, max_num_batched_tokens=budget, num_blocks=200)
    outputs = llm.generate([*PROMPTS, PROMPTS[3]], [scored(num)] * len(PROMPTS) + [scored(None)])
    for output in outputs[:-1]:
        assert_scores(output, tiny.hf, num, llm.tokenizer)
        assert output.outputs[0].token_ids == tiny.tokens(output.prompt_token_ids, 2)
    assert outputs[-1].prompt_logprobs is None


@pytest.mark.parametrize(("num_blocks", "max_tokens"), [(12, 24), (30, 24), (12, 1)])
def test_prompts_that_are_preempted_are_scored_once_and_as_by_transformers(milestone, tiny, num_blocks, max_tokens):
    llm = milestone.LLM(tiny.folder, max_num_batched_tokens=8, num_blocks=num_blocks, block_size=4)
    prompts = [PROMPTS[i] for i in (4, 3, 2, 4, 3)]
    outputs = llm.generate(prompts, scored(2, max_tokens=max_tokens))
    for output in outputs:
        assert_scores(output, tiny.hf, 2, llm.tokenizer)
    if max_tokens == 24:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0


def test_a_prompt_preempted_between_its_chunks_goes_on_scoring_where_it_was(milestone, tiny, monkeypatch):
    engine = milestone.LLMEngine(tiny.folder, max_num_batched_tokens=8, num_blocks=100)
    counts = count_rows(engine.model, monkeypatch)
    engine.add_request("A", PROMPTS[6], scored(1, max_tokens=1))
    assert engine.step() == engine.step() == []
    preempt_all(engine.scheduler)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    [output] = outputs
    assert (output.finished, output.metrics.num_preemptions, sum(counts)) == (True, 1, 99 + 1)
    assert_scores(output, tiny.hf, 1, engine.tokenizer)
    assert not engine.output_processor.parents


def test_only_the_first_output_of_a_stream_has_the_prompts_scores_also_with_n_choices(milestone, tiny):
    llm = milestone.LLM(tiny.folder, max_num_batched_tokens=8, num_blocks=200)
    deltas = list(llm.stream(PROMPTS[4], scored(1, n=3, max_tokens=3)))
    assert [delta.prompt_logprobs is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert_scores(deltas[0], tiny.hf, 1, llm.tokenizer)
    [whole] = llm.generate([PROMPTS[4]], scored(1, n=3, max_tokens=3))
    assert_scores(whole, tiny.hf, 1, llm.tokenizer)
    assert [choice.token_ids for choice in whole.outputs] == [tiny.tokens(PROMPTS[4], 3)] * 3


def test_a_long_prompt_is_scored_in_slices_of_64_rows_at_most(milestone, tiny, monkeypatch):
    llm = milestone.LLM(tiny.folder, max_num_batched_tokens=512, num_blocks=200)
    counts = count_rows(llm.engine.model, monkeypatch)
    prompt = [(7 * i + i * i) % 256 for i in range(400)]
    [plain] = llm.generate([prompt], scored(None, max_tokens=1))
    assert counts == [1]
    counts.clear()
    outputs = llm.generate([prompt, PROMPTS[6]], scored(0, max_tokens=1))
    assert max(counts) == scoring.MOST_ROWS == 64
    assert sum(counts) == 399 + 99 + 2
    for output in outputs:
        assert_scores(output, tiny.hf, 0, llm.tokenizer)
    assert outputs[0].outputs[0].token_ids == plain.outputs[0].token_ids


def test_n_choices_and_a_preemption_after_the_prompt_ask_for_no_row_twice(milestone, tiny, monkeypatch):
    engine = milestone.LLMEngine(tiny.folder, num_blocks=100)
    counts = count_rows(engine.model, monkeypatch)
    engine.add_request("A", PROMPTS[5], scored(0, n=2, max_tokens=4))
    engine.step()
    assert counts in ([32, 2], [32, 1])  # the choices are sampled from a row each, or (from v0.6 on) from one
    preempt_all(engine.scheduler)
    engine.step()
    assert counts[2:] == [2]
    engine.abort_request("A")


def test_max_tokens_0_scores_the_prompt_and_generates_nothing(milestone, tiny):
    llm = milestone.LLM(tiny.folder, num_blocks=200)
    for params in (scored(1, max_tokens=0), scored(1, max_tokens=0, logprobs=2, n=2)):
        [output] = llm.generate([PROMPTS[4]], params)
        assert_scores(output, tiny.hf, 1, llm.tokenizer)
        for choice in output.outputs:
            assert (choice.text, choice.token_ids, choice.logprobs) == ("", [], None)
            assert (choice.finish_reason, choice.stop_reason) == ("length", None)
        [delta] = llm.stream(PROMPTS[4], params)
        assert delta.finished
    # The end token, too, that it would have been.
    ends = SamplingParams(max_tokens=0, prompt_logprobs=0, logit_bias={EOS: 100.0})
    [output] = llm.generate([PROMPTS[4]], ends)
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("length", [])


def test_a_prompts_token_that_is_never_sampled_has_probability_0_and_the_last_rank(milestone, tmp_path):
    from tests.kit.checkpoints import tiny_llama
    from tests.kit.tokenizers import save_byte_tokenizer

    tiny_llama(tmp_path)  # with rows of the output head to spare, which no token owns
    save_byte_tokenizer(tmp_path)
    llm = milestone.LLM(tmp_path, num_blocks=10)
    vocab_size = llm.tokenizer.vocab_size
    assert llm.engine.model.config.vocab_size > vocab_size
    [output] = llm.generate([[1, vocab_size, 2]], scored(2))
    first, last = output.prompt_logprobs[1:]
    assert (first[vocab_size].logprob, first[vocab_size].rank) == (-math.inf, vocab_size + 1)
    assert math.isfinite(last[2].logprob)
    assert vocab_size not in last


def test_a_failed_step_is_computed_again_and_the_scores_are_the_same(milestone):
    def run(**fails):
        model = Successor(**fails)
        engine = milestone.LLMEngine(model, tokenizer=byte_tokenizer(), num_blocks=100, max_num_batched_tokens=8)
        failed = []
        engine.on_failure = lambda request_id, error: failed.append(request_id)
        for prompt in ("abcdefgh", "xyzxyzxyz"):
            engine.add_request(prompt, prompt, scored(1, max_tokens=2))
        outputs = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.prompt_logprobs is not None:
                    outputs[output.request_id] = output.prompt_logprobs
        assert engine.scheduler.block_manager.num_free_blocks == 100
        assert not engine.output_processor.parents
        return outputs, failed

    whole, failed = run()
    assert (len(whole), failed) == (2, [])
    first = whole["abcdefgh"][1]
    assert first[ord("b")].rank == 1
    # The second step has the end of one and the beginning of the other: computed again, each alone, nothing is lost.
    assert run(fails_at=[2]) == (whole, [])
    others, failed = run(poison="z")
    assert (others, failed) == ({"abcdefgh": whole["abcdefgh"]}, ["xyzxyzxyz"])


def test_how_many_prompt_logprobs_there_may_be(milestone, tiny):
    for value in (-1, 21, True, 1.0, "1"):
        with pytest.raises(RequestError, match="prompt_logprobs must be") as error:
            SamplingParams(prompt_logprobs=value)
        assert error.value.param == "prompt_logprobs"
    with pytest.raises(RequestError, match="max_tokens must be at least 0, got -1"):
        SamplingParams(max_tokens=-1, prompt_logprobs=0)
    [output] = milestone.LLM(tiny.folder, num_blocks=10).generate([[1, 2]], scored(20))
    assert len(output.prompt_logprobs[1]) in (20, 21)


@pytest.mark.real_model
def test_prompt_logprobs_of_the_real_model_equal_transformers(load, real):
    llm = load(real)
    text = "The quick brown fox jumps over the lazy dog. Die Antwort ist 42, 中文 🙂.\n" * 22
    outputs = llm.generate([text, "The sky is blue."], scored(3, max_tokens=0))
    assert len(outputs[0].prompt_token_ids) > 512
    for output in outputs:
        expected = reference(real.hf, output.prompt_token_ids, llm.tokenizer.vocab_size)
        for row, token_id, entry in zip(expected, output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert entry[token_id].logprob == pytest.approx(float(row[token_id]), abs=1e-3)
            best = sorted(entry.values(), key=lambda candidate: candidate.rank)[0]
            assert best.logprob == pytest.approx(float(row.max()), abs=1e-3)
