"""What a machine allows at most, and how much of it an engine reaches: sums, from sizes and rates. Torch-free.

A step can be no shorter than it takes to read what it must read, nor than it takes to do its products. Which of the two
counts is a matter of how many operations there are for each byte (Williams, Waterman and Patterson, 2009).
"""

from collections.abc import Sequence
from typing import Any

from common.config import ModelConfig

from ...engine_args import shape_folder

Results = dict[str, Any]

# Of an element of a matrix, where it is not float32's 4. The arithmetic is float32's for all.
WEIGHT_BYTES = {"v0_9-float16": 2, "llama.cpp-float16": 2}

# Of one NVIDIA A10, as NVIDIA's data sheet has them; the second one in 16-bit floating point.
A10_BYTES_PER_S, A10_FLOP_PER_S = 600e9, 125e12


def a10_limits() -> dict[str, float]:
    """Llama 3.1 8B in 16 bits on that card: output tokens/s of 1 and of 32 requests, seconds of a 4,000-token prefill.

    One step reads all matrices once; a prefill multiplies each token with every matrix of the layers. KV and attention
    come on top.
    """
    config = ModelConfig.from_folder(shape_folder("llama-3.1-8b"))
    hidden, width = config.hidden_size, config.head_dim
    attention = hidden * width * (2 * config.num_heads + 2 * config.num_kv_heads)
    layers = config.num_layers * (attention + 3 * hidden * config.intermediate_size)
    step = 2 * (layers + config.vocab_size * hidden) / A10_BYTES_PER_S
    return {"one_tok_s": 1 / step, "many_tok_s": 32 / step, "prefill_s": 2 * layers * 4000 / A10_FLOP_PER_S}


def roofs(
    results: Results, workloads: Sequence[str], comparisons: Sequence[str] = ("comparison",)
) -> tuple[tuple[float, float], tuple[float, float]]:
    """The lowest and the highest roof that was measured, each as GFLOP/s of a product and GB/s that are read.

    Those of the workloads' own rounds in these comparisons; where they have none, those that were measured before and
    after.
    """
    entries = [results[each]["workloads"].get(name, {}) for each in comparisons for name in workloads]
    found = [entry["machine"] for entry in entries if "machine" in entry]
    if not found:
        found = [results["attribution"][key] for key in ("machine", "machine_later") if key in results["attribution"]]
    tops = [rates["float32_tflop_s"]["median"] * 1e3 for rates in found]
    slopes = [rates["read_gb_s"]["median"] for rates in found]
    return (min(tops), min(slopes)), (max(tops), max(slopes))


def roofline_point(results: Results, engine: str, workload: str, comparison: str = "comparison") -> dict[str, float]:
    """Where an engine stands: FLOP for each byte that must be read, GFLOP/s, and the lowest and the highest roof there.

    Counted are the products with the matrices and causal attention; read are all matrices, as this engine stores them,
    once a step, and the KV of all requests in float32. How an engine cuts a prompt into steps is its own affair, so a
    prefill counts as one step.
    """
    model = results["attribution"]["machine"]["model"]
    entry = results[comparison]["workloads"][workload]
    num, prompt, output = entry["num_requests"], entry["input_len"], entry["output_len"]
    length = prompt + output - 1  # tokens that go through the layers; the last one is only sampled
    layers, head = model["layer_elements"], model["head_elements"]
    attention = 2 * model["attention_elements_per_pair"] * length * (length + 1) / 2  # a product with K, and one with V
    flop = num * (2 * layers * length + 2 * head * output + attention)
    kv_read = model["kv_elements_per_token"] * sum(range(prompt, length + 1))
    num_bytes = WEIGHT_BYTES.get(engine, 4) * output * (layers + head) + 4 * num * kv_read
    gflop_s = flop / entry["seconds"][engine]["median"] / 1e9
    intensity = flop / num_bytes
    low, high = (min(top, slope * intensity) for top, slope in roofs(results, [workload], [comparison]))
    return {"intensity": intensity, "gflop_s": gflop_s, "low": low, "high": high}
