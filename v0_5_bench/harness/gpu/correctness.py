"""A part of the GPU checks: on the card, too, a small random Llama says what transformers says, alone or in company."""

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from common import loading
from common.dummy import IdTokenizer
from common.outputs import RequestOutput
from common.sampling_params import SamplingParams

from .card import Settings, report

# Of everything that the real shapes have: grouped heads, llama3's rope, an untied head, several layers.
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "tie_word_embeddings": False,
    "eos_token_id": [],
    "initializer_range": 0.1,  # five times the usual, so that the logits are not flat
}
ATOL = 1e-3  # of logits in float32
BLOCK_SIZE, NUM_NEW_TOKENS = 16, 24
PROMPT_LENS = (5, 61, 16, 17, 40, 1, 33, 58, 15, 27, 48, 9)
FEW_BLOCKS = 14  # all together need 50


def correctness(settings: Settings) -> None:
    """Logits, and greedy tokens: alone, in one batch, preempted. In float32; bfloat16 has to run and stay finite."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_float32_matmul_precision("highest")  # no TF32: it has 10 bits of mantissa
    device = loading.select_device(settings.device)
    torch.manual_seed(0)
    hf: Any = LlamaForCausalLM(LlamaConfig(**SHAPE | {"attn_implementation": "eager"})).eval()
    with tempfile.TemporaryDirectory() as folder:
        hf.save_pretrained(folder)
        tokenizer = IdTokenizer(SHAPE["vocab_size"])
        wide = settings.llm(folder, tokenizer=tokenizer, dtype="float32", num_blocks=200)
        narrow = settings.llm(folder, tokenizer=tokenizer, dtype="bfloat16", num_blocks=200)
    hf = hf.to(device)
    few = settings.llm(wide.engine.model, tokenizer=tokenizer, num_blocks=FEW_BLOCKS, max_num_batched_tokens=64)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(SHAPE["vocab_size"], (n,), generator=generator).tolist() for n in PROMPT_LENS]
    expected = [_continue(hf, prompt) for prompt in prompts]

    report("logits_float32", _compare_logits, hf, wide, ATOL)
    report("logits_bfloat16", _compare_logits, hf, narrow, None)
    report("tokens_alone", lambda: _compare_tokens(hf, [_answer(wide, [p])[0] for p in prompts], expected))
    report("tokens_batched", lambda: _compare_tokens(hf, _answer(wide, prompts), expected))
    report("tokens_preempted", lambda: _compare_tokens(hf, _answer(few, prompts), expected, preempted=True))
    report("blocks_returned", _check_idle, [wide, few, narrow])
    report("runs_bfloat16", lambda: {"tokens": sum(len(o.outputs[0].token_ids) for o in _answer(narrow, prompts))})


@torch.inference_mode()
def _compare_logits(hf: Any, llm: Any, atol: float | None) -> dict[str, float]:
    """Every position's logits, the prompt in two chunks and then token by token, through blocks out of order.

    The pool is the engine's, which has nothing to do yet.
    """
    model, num_tokens, chunks = llm.engine.model, 200, [100, 90, *[1] * 10]
    token_ids = torch.randint(SHAPE["vocab_size"], (num_tokens,), generator=torch.Generator().manual_seed(2))
    token_ids = token_ids.to(model.device)
    table = list(range(num_tokens // BLOCK_SIZE + 1, 0, -1))
    cache = llm.engine.model_runner.kv_cache
    rows, end = [], 0
    for chunk in chunks:
        start, end = end, end + chunk
        cache.begin_step([table[: -(-end // BLOCK_SIZE)]], [chunk], [end])
        positions = torch.arange(start, end, device=model.device)
        rows.append(model.logits(model.forward(token_ids[start:end], positions, cache)))
    ours: Tensor = torch.cat(rows)  # [num_tokens, vocab_size]
    theirs: Tensor = hf(token_ids[None]).logits[0]
    difference = float((ours - theirs).abs().max())
    assert ours.isfinite().all(), "logits that are not finite"
    assert atol is None or difference <= atol, f"logits differ by {difference}, more than {atol}"
    return {"max_abs_difference": difference, "std_of_logits": float(theirs.std())}


@torch.inference_mode()
def _continue(hf: Any, prompt: list[int]) -> list[int]:
    """Greedy tokens by transformers, without its cache: each from a whole forward pass."""
    token_ids = torch.tensor([prompt], device=hf.device)
    for _ in range(NUM_NEW_TOKENS):
        token_ids = torch.cat([token_ids, hf(token_ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return token_ids[0, len(prompt) :].tolist()


def _answer(llm: Any, prompts: list[list[int]]) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    return llm.generate(prompts, params, use_tqdm=False)


@torch.inference_mode()
def _compare_tokens(
    hf: Any, outputs: list[RequestOutput], expected: list[list[int]], *, preempted: bool = False
) -> dict[str, int]:
    """Raise unless all tokens are equal; a difference is told with how near the two were in transformers."""
    for number, (output, theirs) in enumerate(zip(outputs, expected, strict=True)):
        ours = output.outputs[0].token_ids
        index = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if index is not None:
            known = torch.tensor([[*output.prompt_token_ids, *theirs[:index]]], device=hf.device)
            logits = hf(known).logits[0, -1]
            gap = float(logits[theirs[index]] - logits[ours[index]])
            raise AssertionError(f"prompt {number}, token {index}: {ours[index]}, not {theirs[index]} (by {gap:.2g})")
    num_preemptions = sum(output.metrics.num_preemptions for output in outputs)
    assert (num_preemptions > 0) == preempted, f"{num_preemptions} preemptions"
    return {"tokens": sum(map(len, expected)), "num_preemptions": num_preemptions}


def _check_idle(llms: Sequence[Any]) -> None:
    for llm in llms:
        llm.engine.scheduler.check_integrity()
        blocks = llm.engine.scheduler.block_manager
        assert blocks.num_free_blocks == blocks.num_blocks, "blocks without an owner"
