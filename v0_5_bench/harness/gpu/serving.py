"""Two parts of the GPU checks: how fast an engine is on the card, and how fast transformers is, on the same shape."""

import time
from typing import Any

import torch
from torch import Tensor

from common import loading
from common.config import ModelConfig
from common.measuring.recipe import spread
from common.sampling_params import SamplingParams
from common.weights import resolve

from ...engine_args import shape_folder
from ...scheduler import SchedulerOutput
from ..compare.rates import timed, wait
from ..explain.profiler import Profiler
from ..load.workloads import random_ids
from .card import Settings, report

SMALL_BUDGET, LARGE_BUDGET = 512, 4096
LARGE_CARD = 40 * 2**30  # bytes; on a smaller one, a step of LARGE_BUDGET tokens of an 8B model leaves little for KV


def serving(settings: Settings) -> None:
    """Load; tokens/s of short requests; time to the first token of long ones; and where a step's time goes."""
    device = loading.select_device(settings.device)
    torch.zeros(1, device=device)  # CUDA's own start is no part of loading
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    budget = LARGE_BUDGET if memory >= LARGE_CARD else SMALL_BUDGET
    start = time.perf_counter()
    model, load_format = (settings.model, "auto") if settings.model else (settings.shape, "dummy")
    engine = settings.llm(model, load_format=load_format, max_num_batched_tokens=budget).engine
    wait(device)
    report("load", _describe, engine, time.perf_counter() - start)

    prompt_len, num_new_tokens = settings.lengths
    # More than the pool can hold at once would measure preemption.
    fits = engine.pool.num_tokens // (prompt_len + num_new_tokens + engine.scheduler.block_manager.block_size)
    sizes = [num for num in settings.num_requests if num <= fits]
    for num in sizes:
        prompts = random_ids(num, prompt_len, highest_id=engine.vocab_size - 1)
        report(f"decode_{num}", _decode, engine, prompts, num_new_tokens, settings.repeats)
    for step_budget in sorted({SMALL_BUDGET, budget}):
        for length in settings.long_prompts:
            if length < engine.scheduler.max_request_len:
                prompts = random_ids(1, length, highest_id=engine.vocab_size - 1)
                report(f"prefill_{length}_by_{step_budget}", _prefill, engine, prompts, step_budget, settings.repeats)
    for num in sizes[::2]:
        prompts = random_ids(num, prompt_len, highest_id=engine.vocab_size - 1)
        report(f"split_{num}", _split, engine, prompts, num_new_tokens)


def transformers(settings: Settings) -> None:
    """The same shape in transformers' `generate`: output tokens/s of the first two sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    device = loading.select_device(settings.device)
    dtype = loading.select_dtype("auto", device)
    hf: Any
    if settings.model:
        hf = LlamaForCausalLM.from_pretrained(resolve(settings.model), dtype=dtype)
        hf = hf.to(device)
    else:
        torch.set_default_dtype(dtype)  # drawn in their dtype and where they stay, as ours are
        with device:
            hf = LlamaForCausalLM(LlamaConfig.from_pretrained(shape_folder(settings.shape)))
        torch.set_default_dtype(torch.float32)
    for num in settings.num_requests[:2]:
        report(f"generate_{num}", _generate, hf.eval(), num, *settings.lengths, settings.repeats)


def _describe(engine: Any, seconds: float) -> dict[str, Any]:
    """The pool, and how much a step reads and computes; the product with the head is counted by itself."""
    model, config, kv_cache = engine.model, engine.model.config, engine.model_runner.kv_cache
    return {
        "seconds": round(seconds, 3),
        "kv_cache": type(kv_cache).__name__,
        "cuda_graphs": getattr(kv_cache, "recordings", None) is not None,
        "pool": engine.pool.explanation,
        "pool_tokens": engine.pool.num_tokens,
        "max_model_len": engine.max_model_len,
        "dtype": str(model.dtype).removeprefix("torch."),
        "bytes_per_element": model.dtype.itemsize,
        "layer_elements": _layer_elements(config),
        "head_elements": config.hidden_size * config.vocab_size,
        "kv_elements_per_token": config.kv_elements_per_token,
    }


def _layer_elements(config: ModelConfig) -> int:
    """Of all layers' matrices and norms: an engine may hold them in a form of its own."""
    attention = 2 * config.hidden_size * config.head_dim * (config.num_heads + config.num_kv_heads)
    mlp, norms = 3 * config.hidden_size * config.intermediate_size, 2 * config.hidden_size
    return config.num_layers * (attention + mlp + norms)


def _decode(engine: Any, prompts: list[list[int]], num_new_tokens: int, repeats: int) -> dict[str, Any]:
    """Output tokens/s of the whole, prompts included, and of what came once all had their first token."""
    usage: dict[str, float] = {"peak_blocks": 0}

    def watch(_: SchedulerOutput) -> None:
        blocks, running = engine.scheduler.block_manager, engine.scheduler.running
        used = blocks.num_blocks - blocks.num_free_blocks
        if used > usage["peak_blocks"]:
            filled = sum(request.num_computed_tokens for request in running) / (used * blocks.block_size)
            usage.update(peak_blocks=used, share_of_pool=used / blocks.num_blocks, share_of_slots_filled=filled)

    engine.on_step = watch
    _serve(engine, prompts, num_new_tokens)  # warm-up, and the use of the KV pool
    engine.on_step = None
    runs = [_serve(engine, prompts, num_new_tokens) for _ in range(repeats)]
    num_tokens = len(prompts) * num_new_tokens
    return {
        "output_tokens_per_s": spread([num_tokens / seconds for _, seconds, _ in runs]),
        "decode_tokens_per_s": spread([num_later / (seconds - first) for first, seconds, num_later in runs]),
        "ttft_ms": spread([1e3 * first for first, _, _ in runs]),
        "prompt_len": len(prompts[0]),
        "num_new_tokens": num_new_tokens,
        "kv": {name: round(value, 6) for name, value in usage.items()},
    }


def _prefill(engine: Any, prompts: list[list[int]], budget: int, repeats: int) -> dict[str, Any]:
    """Time to the first token, the prompt computed in chunks of `budget` tokens."""
    before, engine.scheduler.max_num_batched_tokens = engine.scheduler.max_num_batched_tokens, budget
    try:
        seconds = [_serve(engine, prompts, 1)[0] for _ in range(1 + repeats)]
    finally:
        engine.scheduler.max_num_batched_tokens = before
    return {"ttft_ms": spread([1e3 * s for s in seconds[1:]]), "prompt_len": len(prompts[0]), "budget": budget}


def _split(engine: Any, prompts: list[list[int]], num_new_tokens: int) -> dict[str, Any]:
    """Where a step's time goes. A CUDA graph is one call of the model, and its products are not told apart."""
    with Profiler(engine) as profiler:
        _serve(engine, prompts, num_new_tokens)
    return profiler.summary()


def _serve(engine: Any, prompts: list[list[int]], num_new_tokens: int) -> tuple[float, float, int]:
    """Serve prompts from the first step to the last.

    Returns:
        Seconds until all had their first token, seconds in all, and the number of tokens that came between the two.
    """
    params = SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True)
    without_token = {str(i) for i in range(len(prompts))}
    first, num_later, start = 0.0, 0, time.perf_counter()
    try:
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()  # which has waited for the card: it returns tokens
            if not without_token:
                num_later += len(outputs)
                continue
            without_token -= {output.request_id for output in outputs}
            first = time.perf_counter() - start
        return first, time.perf_counter() - start, num_later
    finally:
        for i in range(len(prompts)):  # those that a step that failed has left behind
            engine.abort_request(str(i))


@torch.inference_mode()
def _generate(hf: Any, num: int, prompt_len: int, num_new_tokens: int, repeats: int) -> dict[str, Any]:
    from transformers import GenerationConfig

    prompt = torch.randint(hf.config.vocab_size, (num, prompt_len), device=hf.device)
    # `None` would be replaced by the model's own end tokens; an id past the vocabulary never comes.
    no_end = hf.config.vocab_size
    greedy = GenerationConfig(do_sample=False, max_new_tokens=num_new_tokens, eos_token_id=no_end, pad_token_id=0)

    def run() -> Tensor:
        return hf.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=greedy)

    assert run().shape[1] == prompt_len + num_new_tokens
    seconds = timed(run, hf.device, repeats)
    return {"output_tokens_per_s": spread([num * num_new_tokens / s for s in seconds])}
