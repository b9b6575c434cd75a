"""Which drafter pays, and when: `python -m v0_7_speculative.measurements.experiment`. One request, greedy.

    costs            a step that checks K drafts against a plain one; a draft pass of E layers and the head
    ngram_...        n-gram lookup on these workloads (`workloads.py`), K = 1, 2, 4, 8
    early_exit_...   the model's first E layers as its drafter, on free chat, K = 1, 2, 4, 8
    draft_model      the model as its own draft model: every draft is right
    vllm             vLLM with its n-gram drafter on the same workloads, and ours (needs --vllm-venv)
    break_even       no measurement: the prices above put together, and the plot

Each answer is compared with that of plain decoding, token by token: another one ends the run. Plain decoding and every
K take turns in one process, on one set of weights; a speed-up is taken within a round, between the times from the first
token to the last. The figures go to `experiment.json` with their recipe; the pages quote that file. Each part takes at
most three minutes; `--only` names some, and leaves the others as the file has them.
"""

import argparse
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common import loading
from common.llama import Model
from common.measuring.recipe import recipe, spread
from common.sampling_params import SamplingParams
from common.tokenizer import Tokenizer
from common.weights import resolve

from ..llm import LLM
from ..scheduler import SchedulerOutput
from .break_even import draw, put_together
from .costs import measure_costs
from .vllm_ngram import measure_vllm
from .workloads import WORKLOADS

RESULTS = Path(__file__).with_suffix(".json")
NUM_DRAFTS = (1, 2, 4, 8)
EXIT_LAYERS = (2, 5, 11, 15, 20, 25, 28)
NUM_BLOCKS = 64  # 1,024 tokens: longer than any request here
MOST_TOKENS = 128  # of an answer; edited and copied texts end before
MOST_CHAT_TOKENS = 64  # of free chat: behind these the model repeats one sentence for ever, which is `loop`
WARM_UP_LEN = 8


@dataclass(slots=True)
class Run:
    """One answer: its tokens, the seconds of the whole and of all but the first token, and of each step its drafts."""

    token_ids: list[int]
    seconds: float
    decode_seconds: float
    steps: list[tuple[int, int]] = field(default_factory=list)  # drafts, accepted


class Engines:
    """`LLM`s over one set of weights, made when they are first asked for.

    Args:
        model: the weights of all of them.
        tokenizer: theirs.
        folder: where the weights came from.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, folder: Path) -> None:
        self.model, self.tokenizer, self.folder = model, tokenizer, folder

    def make(self, method: str | None = None, num_drafts: int = 1, **engine_args: Any) -> LLM:
        """One that drafts by `method`, or not at all."""
        return LLM(
            self.model,
            tokenizer=self.tokenizer,
            num_blocks=NUM_BLOCKS,
            enable_prefix_caching=False,
            speculative_method=method,
            num_speculative_tokens=num_drafts,
            **engine_args,
        )

    def prompt(self, workload: str) -> list[int]:
        """A workload's question in the chat template."""
        return self.tokenizer.chat_token_ids([{"role": "user", "content": WORKLOADS[workload]}], True, False)


def main() -> None:
    """Run the parts, print what they measured and write it down."""
    parts = {
        "costs": lambda engines, args: measure_costs(engines.make, engines.prompt("summarise"), args.repeats),
        **{f"ngram_{name}": _ngram(name, MOST_TOKENS) for name in ("copy", "edit", "summarise")},
        "ngram_chat": _ngram("chat", MOST_CHAT_TOKENS),
        "ngram_loop": _ngram("chat", MOST_TOKENS),
        **{f"early_exit_{layer}": _early_exit(layer) for layer in EXIT_LAYERS},
        "draft_model": _draft_model,
        "vllm": lambda engines, args: measure_vllm(engines, args.vllm_venv, MOST_CHAT_TOKENS, args.repeats),
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*parts, "break_even"], default=[*parts, "break_even"])
    parser.add_argument("--repeats", type=int, default=3, help="rounds that count, after a short one that warms up")
    parser.add_argument("--vllm-venv", type=Path, help="the environment of vLLM; without it, its part is left out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: the file that the documents quote")
    args = parser.parse_args()
    results: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    engines = None
    for name in args.only:
        if name == "vllm" and args.vllm_venv is None:
            continue
        if name == "break_even":
            results[name] = put_together(results)
            draw(results)
        else:
            if engines is None:
                folder = resolve(None)
                engines = Engines(*loading.load(folder, None, device="cpu", dtype="float32"), folder)
            made = recipe(
                model=engines.folder.name.rpartition("-")[0],
                dtype="float32",
                threads=torch.get_num_threads(),
                block_size=16,
                warmup_tokens=WARM_UP_LEN,
                repeats=args.repeats,
            )
            results[name] = {"recipe": made, **parts[name](engines, args)}
        print(json.dumps({key: value for key, value in results[name].items() if key != "recipe"}, indent=1))
        args.out.write_text(json.dumps(results, indent=1) + "\n")


def _ngram(workload: str, max_tokens: int) -> Any:
    def measure(engines: Engines, args: argparse.Namespace) -> dict[str, Any]:
        llms = {str(num): engines.make("ngram", num) for num in NUM_DRAFTS}
        return compare(engines, llms, workload, max_tokens, args.repeats)

    return measure


def _early_exit(exit_layer: int) -> Any:
    def measure(engines: Engines, args: argparse.Namespace) -> dict[str, Any]:
        llms = {str(num): engines.make("early_exit", num, exit_layer=exit_layer) for num in NUM_DRAFTS}
        return compare(engines, llms, "chat", MOST_CHAT_TOKENS, args.repeats)

    return measure


def _draft_model(engines: Engines, args: argparse.Namespace) -> dict[str, Any]:
    llms = {str(num): engines.make("draft_model", num, draft_model=str(engines.folder)) for num in NUM_DRAFTS}
    return compare(engines, llms, "chat", MOST_CHAT_TOKENS, args.repeats)


def compare(engines: Engines, llms: dict[str, LLM], workload: str, max_tokens: int, repeats: int) -> dict[str, Any]:
    """Plain decoding and each of these, in turns: speed-ups within a round, and what was accepted."""
    ways = {"plain": engines.make()} | llms
    prompt = engines.prompt(workload)
    names = list(ways)
    for llm in ways.values():
        answer(llm, prompt, WARM_UP_LEN)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for repeat in tqdm(range(repeats), desc=workload, unit="round"):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            runs[name].append(answer(ways[name], prompt, max_tokens))
            check_same(runs[name][-1], runs[name][0], name)
    plain = runs.pop("plain")
    for name, its_runs in runs.items():
        check_same(its_runs[0], plain[0], name)
    num_tokens = len(plain[0].token_ids)
    return {
        "what": f"{workload}: {len(prompt)} prompt tokens, {num_tokens} new ones, greedy, one request",
        "num_prompt_tokens": len(prompt),
        "num_tokens": num_tokens,
        "answer": engines.tokenizer.decode(plain[0].token_ids),
        "plain": {
            "tokens_per_s": spread([(num_tokens - 1) / run.decode_seconds for run in plain]),
            "step_ms": spread([1e3 * run.decode_seconds / (num_tokens - 1) for run in plain]),
            "seconds": spread([run.seconds for run in plain]),
        },
        "ways": {name: _beside(its_runs, plain) for name, its_runs in runs.items()},
    }


def answer(llm: LLM, prompt: list[int], max_tokens: int) -> Run:
    """Greedy, up to its end or so many tokens."""
    steps: list[tuple[int, int]] = []

    def note(scheduled: SchedulerOutput) -> None:
        steps.append((sum(scheduled.num_draft_tokens), sum(scheduled.num_accepted_tokens.values())))

    llm.engine.on_step = note
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    [output] = llm.generate([prompt], params, use_tqdm=False)
    times = output.metrics
    return Run(
        output.outputs[0].token_ids,
        times.finished_time - times.arrival_time,
        times.finished_time - times.first_token_time,
        steps[1:],  # the first one is the prompt's
    )


def check_same(run: Run, other: Run, name: str) -> None:
    """Raise unless two answers have the same tokens."""
    if run.token_ids != other.token_ids:
        raise SystemExit(f"{name}: another answer than plain decoding's")


def _beside(runs: list[Run], plain: list[Run]) -> dict[str, Any]:
    """A way's figures beside plain decoding's of the same rounds."""
    num_tokens, num_steps = len(runs[0].token_ids) - 1, len(runs[0].steps)
    rounds = list(zip(runs, plain, strict=True))
    return {
        "speed_up": spread([b.decode_seconds / a.decode_seconds for a, b in rounds]),
        "request_speed_up": spread([b.seconds / a.seconds for a, b in rounds]),
        "step_in_plain_steps": spread(
            [a.decode_seconds / num_steps / (b.decode_seconds / num_tokens) for a, b in rounds]
        ),
        "tokens_per_step": num_tokens / num_steps,
        **acceptance(runs[0].steps),
    }


def acceptance(steps: list[tuple[int, int]]) -> dict[str, Any]:
    """Of all drafts, the percentage that was right; and by position: of the drafts there, those accepted.

    A draft counts as accepted only if those before it were: what is behind a wrong one is thrown away.
    """
    drafts: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for num_drafts, num_accepted in steps:
        drafts.update(range(1, num_drafts + 1))
        accepted.update(range(1, num_accepted + 1))
    return {
        "drafts": drafts.total(),
        "accepted_percent": round(100 * accepted.total() / max(1, drafts.total()), 1),
        "by_position_percent": {
            str(place): round(100 * accepted[place] / drafts[place], 1) for place in sorted(drafts)
        },
    }


if __name__ == "__main__":
    main()
