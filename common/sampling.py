"""The batched sampler: logits in, one token per row out, no row aware of another.

Each output position of a request draws *one* uniform number, a pure function of (seed, output index), and looks it up
in the inverse CDF of the filtered distribution. So there is no generator state to save, a preempted request that is
computed again draws the same numbers, and a row's token depends on nothing in the batch but its own logits.

The order of the steps is vLLM's: mask and bias, penalties, temperature, min_p, top_k, top_p. Changes in no milestone.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.outputs import TokenLogprobs
from common.sampling_params import LogitBias, SamplingParams, SamplingState

logger = logging.getLogger(__name__)

# The filters look at so many of the most likely tokens first, and at 8 times as many where that was too few.
FIRST_CANDIDATES = 256
FEW = 16  # a bias on fewer tokens than a 16th of the vocabulary is added to these alone


@dataclass(slots=True)
class SamplerOutput:
    """One entry per row: the sampled token, and its log-probabilities where the request asked for them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


def sample(logits: Tensor, states: Sequence[SamplingState]) -> SamplerOutput:
    """Choose the next token of each request.

    Args:
        logits: `[R, vocab_size]`, float32, the model's own; not changed.
        states: the `R` requests. Each row draws the number of output index `len(output_token_ids)`.
    """
    raw = logits
    if any(_adjusts(state) for state in states):
        logits = logits.clone()
        _add_biases(logits, states)
        for row, state in zip(logits, states, strict=True):
            _adjust(row, state)
    # max gives the greedy choice of every row, and carries a NaN along: a free check.
    top, greedy = logits.max(dim=-1)
    token_ids, is_finite = greedy.tolist(), top.isfinite().tolist()
    if not all(is_finite):
        _warn(raw, [i for i, finite in enumerate(is_finite) if not finite], states)
    plain: list[int] = []
    filtered: list[int] = []
    for i, state in enumerate(states):
        if not state.params.is_greedy and is_finite[i]:  # no distribution can be made of what is not finite
            (filtered if _filters(state.params) else plain).append(i)
    for rows, choose in ((plain, _sample_plain), (filtered, _sample_filtered)):
        if rows:
            chosen = [states[i] for i in rows]
            # The largest logit becomes 0, so that no temperature, however small, overflows.
            scaled = logits[rows].sub_(top[rows, None]).div_(_column([s.params.temperature for s in chosen], logits))
            uniforms = _column([uniform(s.seed, len(s.output_token_ids)) for s in chosen], logits, torch.float64)
            for i, token_id in zip(rows, choose(scaled, uniforms, [s.params for s in chosen]), strict=True):
                token_ids[i] = token_id
    return SamplerOutput(token_ids, _logprobs(raw, token_ids, states))


def uniform(seed: int, index: int) -> float:
    """The number in `[0, 1)` that belongs to an output position.

    Philox (Salmon et al., 2011) is a counter-based generator: any position's number is computed directly, without those
    before it. The seed is the key, the output index the counter.
    """
    bits = np.random.Philox(key=seed % 2**64, counter=index).random_raw()
    return (int(bits) >> 11) * 2.0**-53


def _adjusts(state: SamplingState) -> bool:
    params = state.params
    return bool(
        params.logit_bias
        or len(state.output_token_ids) < params.min_tokens
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
    )


def _warn(raw: Tensor, rows: list[int], states: Sequence[SamplingState]) -> None:
    """Say that these rows are not finite: once for a request, not once for each of its tokens."""
    new = [i for i in rows if not states[i].warned]
    for i in new:
        states[i].warned = True
    if any(not raw[i].isfinite().all() for i in new):
        logger.warning("The model's logits are not finite, the text may be garbled: try --dtype bfloat16 or float32.")
    elif new:
        logger.warning("A request's repetition_penalty takes logits beyond float32's range: its text may be garbled.")


def _add_biases(logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Add the `logit_bias` of each request in place, for all rows that share one (the choices of a request) at once."""
    rows_of: dict[int, tuple[list[int], LogitBias]] = {}
    for i, state in enumerate(states):
        if isinstance(state.params.logit_bias, LogitBias):
            rows_of.setdefault(id(state.params.logit_bias), ([], state.params.logit_bias))[0].append(i)
    for rows, biases in rows_of.values():
        ids, bias = _bias(biases, logits)
        if ids is None:
            logits[rows] += bias
        else:
            logits[_column(rows, logits, torch.long), ids] += bias


def _bias(biases: LogitBias, logits: Tensor) -> tuple[Tensor | None, Tensor]:
    """A request's biases, and the ids that they belong to: `[k]` each; or `None` and a whole row, where they are many.

    Made once: a bias for every token of the vocabulary takes longer to bring here than to add.
    """
    key = (logits.device, vocab_size := logits.shape[1])
    if key not in biases.memo:
        ids = _ids(biases, logits[0])
        values = torch.tensor([bias for i, bias in biases.items() if i < vocab_size], device=logits.device)
        whole = torch.zeros(vocab_size, device=logits.device).index_put_((ids,), values)
        biases.memo[key] = (ids, values) if len(ids) * FEW < vocab_size else (None, whole)
    return biases.memo[key]


def _adjust(row: Tensor, state: SamplingState) -> None:
    """Apply what belongs to one request alone, in place: mask, penalties."""
    params = state.params
    if len(state.output_token_ids) < params.min_tokens and state.end_token_ids:
        row[_ids(state.end_token_ids, row)] = -torch.inf
    if params.repetition_penalty != 1.0:
        # Keskar et al., 2019: scores are divided or multiplied so that both signs move down.
        seen = _ids({*state.prompt_token_ids, *state.output_token_ids}, row)
        scores = row[seen]
        row[seen] = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and state.output_token_ids:
        seen, counts = torch.tensor(state.output_token_ids, device=row.device).unique(return_counts=True)
        row[seen] -= params.presence_penalty + params.frequency_penalty * counts


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _sample_plain(scaled: Tensor, uniforms: Tensor, _: Sequence[SamplingParams]) -> list[int]:
    """Inverse CDF over the whole vocabulary in the order of ids: `scaled` `[r, vocab_size]`, `uniforms` `[r, 1]`."""
    cdf = scaled.exp().cumsum(dim=-1, dtype=torch.float64)
    return _lookup(cdf, uniforms * cdf[:, -1:])[:, 0].tolist()


def _sample_filtered(scaled: Tensor, uniforms: Tensor, params: Sequence[SamplingParams]) -> list[int]:
    """Inverse CDF over the tokens that min_p, top_k and top_p leave, in the order of probability.

    Sorting the vocabulary would cost many times the rest of the sampler, for the sake of a handful of tokens. So only
    the most likely ones are sorted, and more of them for those rows where they turn out to be too few. What is left
    is exactly what a full sort would leave, however many candidates it took.
    """
    vocab_size = scaled.shape[1]
    min_p, top_p = (_column([getattr(p, name) for p in params], scaled) for name in ("min_p", "top_p"))
    top_k = _column([min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params], scaled)
    probs = scaled.exp()  # relative to the likeliest token's 1
    if any(p.min_p > 0.0 for p in params):
        probs.masked_fill_(probs < min_p, 0.0)
    # Row by row: how sum(dim=-1) splits a row, and so its last bit, depends on how many rows there are.
    mass = torch.stack([row.sum(dtype=torch.float64) for row in probs])[:, None]
    chosen = torch.empty(len(params), dtype=torch.long)
    rows, num_candidates = torch.arange(len(params), device=scaled.device), FIRST_CANDIDATES
    while len(rows):
        num_candidates = min(num_candidates, vocab_size)
        candidates, ids = _most_likely(scaled[rows], num_candidates)
        kept, cdf = _keep(candidates, mass[rows], min_p[rows], top_k[rows], top_p[rows])
        # Certain is what does not reach the last candidate, nor a value equal to it: there may be more of these.
        complete = num_candidates == vocab_size
        settled = (candidates.gather(-1, kept - 1) > candidates[:, -1:]) & (
            (top_k[rows] < num_candidates) | (top_k[rows] == vocab_size)
        )
        ranks = _lookup(cdf, uniforms[rows] * cdf.gather(-1, kept - 1))
        done = (settled | complete)[:, 0]
        chosen[rows[done].cpu()] = ids.gather(-1, ranks)[done, 0].cpu()
        rows, num_candidates = rows[~done], num_candidates * 8
    return chosen.tolist()


def _keep(candidates: Tensor, mass: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """How many of each row's sorted candidates the filters leave `[r, 1]`, at least one; and their running sum.

    `mass` is the sum over all tokens that min_p leaves, candidates or not.
    """
    probs = candidates.exp()
    keep = (probs >= min_p) & (torch.arange(probs.shape[1], device=probs.device) < top_k)
    probs = probs.double()
    cdf = probs.cumsum(dim=-1)
    # top_p is a share of what min_p and top_k left. Its set is the smallest one that reaches the share: a token stays
    # as long as those before it have not reached it.
    left = torch.where(keep.all(dim=-1, keepdim=True), mass, (probs * keep).sum(dim=-1, keepdim=True))
    keep &= (top_p == 1.0) | (cdf - probs < top_p * left)
    return keep.sum(dim=-1, keepdim=True).clamp_(min=1), cdf


def _most_likely(scaled: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The `num` largest of each row, largest first, equal ones by id.

    Which of several that equal the last one are among them is left open: callers that care look at more.
    """
    values, ids = scaled.topk(num, dim=-1)
    ids, order = ids.sort(dim=-1)
    values, by_value = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)


def _lookup(cdf: Tensor, targets: Tensor) -> Tensor:
    """Index of each row's first entry above its target, `[r, V]` and `[r, 1]` to `[r, 1]`: never one of probability 0.

    If NaN has made every comparison false, the index is the last one instead of one past it.
    """
    return torch.searchsorted(cdf, targets, right=True).clamp_(max=cdf.shape[1] - 1)


def _logprobs(raw: Tensor, token_ids: list[int], states: Sequence[SamplingState]) -> list[TokenLogprobs | None]:
    """Log-softmax of the model's own logits: for the sampled token, and the `logprobs` most likely ones."""
    out: list[TokenLogprobs | None] = [None] * len(states)
    for i, state in enumerate(states):
        if state.params.logprobs is None:
            continue
        [out[i]] = token_logprobs(raw[i : i + 1], token_ids[i : i + 1], [state.params.logprobs])
    return out


def token_logprobs(logits: Tensor, token_ids: Sequence[int], nums: Sequence[int]) -> list[TokenLogprobs]:
    """Log-softmax, row by row, at one token, and at the `nums[i]` most likely ones.

    A token beyond the row is one that a prompt may have, but that is never sampled: its probability is 0.

    Args:
        logits: `[R, V]`, the model's own.
        token_ids: one for each row.
        nums: how many of the most likely tokens each row reports; of no more than all.
    """
    vocab_size = logits.shape[1]
    logprobs = logits.log_softmax(dim=-1)
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    own = logprobs.gather(-1, ids.clamp(max=vocab_size - 1)).masked_fill_(ids >= vocab_size, -torch.inf)
    ranks = (logprobs > own).sum(dim=-1) + 1
    values, top = _most_likely(logprobs, min(max(nums), vocab_size))
    rows = zip(token_ids, own[:, 0].tolist(), ranks.tolist(), top.tolist(), values.tolist(), nums, strict=True)
    return [
        TokenLogprobs([token_id, *top[:num]], [logprob, *values[:num]], [rank, *range(1, len(top[:num]) + 1)])
        for token_id, logprob, rank, top, values, num in rows
    ]


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]


def _ids(ids: Iterable[int], row: Tensor) -> Tensor:
    # A prompt, or a model's list of end tokens, may hold ids beyond the row, where a padded output head has been cut to
    # the tokenizer's vocabulary: they are never sampled, so there is nothing to change.
    return torch.tensor([i for i in ids if i < len(row)], dtype=torch.long, device=row.device)
