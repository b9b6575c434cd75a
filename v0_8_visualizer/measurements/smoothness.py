"""Whether the page stays smooth: `python -m v0_8_visualizer.measurements.smoothness`.

500 requests, 32 of which run, on 4,096 blocks, at 60 steps a second: a made-up run whose messages go straight into the
page, so that neither a server nor a network is measured. In headless Chromium, which draws without a GPU. Two figures,
in milliseconds: what a frame takes the page's own code (`draw`), and the time between two frames (`gap`), which has
the browser's layout and painting in it, and is never below a screen's 16.7. The figures go to `smoothness.json` with
their recipe. It needs Playwright (`pip install -e '.[browser]'`) and Chromium, and takes half a minute.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from common.measuring.browser import launched
from common.measuring.recipe import recipe, spread

from .pictures import site

RESULTS = Path(__file__).with_suffix(".json")
NUM_REQUESTS, NUM_RUNNING, NUM_BLOCKS, STEPS_A_SECOND = 500, 32, 4096, 60
SECONDS, WARM_UP_SECONDS = 6, 2

RUN = """
async ({ numRequests, numRunning, numBlocks, stepsASecond, seconds, warmUpSeconds }) => {
  const { source, frameTimes } = window.visualizer;
  const to = source.to;
  source.player.pause();
  let seq = 0;
  const block = (index) => (index * 7) % numBlocks;
  const requests = Array.from({ length: numRequests }, (_, index) => ({
    request_id: `r${index}/0`, parent_id: `r${index}`, state: index < numRunning ? "decode" : "waiting",
    forked_from: null, prompt: `Question ${index}: why is the sky blue?`, num_prompt_tokens: 400, max_tokens: 900,
    num_output_tokens: index < numRunning ? 1 : 0, num_computed_tokens: index < numRunning ? 400 : 0, num_tokens: 401,
    num_cached_tokens: 0, num_preemptions: 0, num_draft_tokens: 0, num_accepted_tokens: 0, text: "",
    block_table: index < numRunning ? Array.from({ length: 25 }, (_, i) => block(index * 90 + i)) : [],
  }));
  const settings = {
    num_blocks: numBlocks, block_size: 16, max_num_batched_tokens: 512, max_num_seqs: numRunning,
    max_model_len: 8192, enable_prefix_caching: true, speculative_method: null, num_speculative_tokens: 0,
    allow_control: false,
  };
  const pace = { paused: false, delay: 0 };
  to.messages([{ seq, type: "snapshot", time: 0, reason: "connected", milestone: "v0.8", model: "made up", settings,
    pace, step: -1, requests, cached_blocks: [] }]);
  let number = 0;
  const step = () => {
    const time = number / stepsASecond, messages = [];
    const say = (type, fields) => messages.push({ seq: ++seq, type, time, ...fields });
    const ids = requests.slice(0, numRunning).map((request) => request.request_id);
    ids.forEach((request_id, index) => {
      if (number % 16 === index % 16) {
        say("block_allocated", { block: block(index * 90 + 25 + Math.floor(number / 16)), request_id });
      }
    });
    ids.forEach((request_id) => say("decode", { request_id, token_ids: [number], text: ` word${number % 100}` }));
    const scheduled = ids.map((request_id) => ({ request_id, num_tokens: 1, is_decode: true, num_draft_tokens: 0 }));
    say("step", { number, token_budget: 512, scheduled, preempted: [], refused: `r${numRunning}/0`,
      refused_reason: "max_num_seqs", num_running: numRunning, num_waiting: numRequests - numRunning,
      num_free_blocks: 1000, schedule_seconds: 1e-4, run_seconds: 0.015, update_seconds: 1e-4, output_seconds: 1e-4 });
    number += 1;
    to.messages(messages);
  };
  const begin = performance.now(), gaps = [];
  let draws = [], last = begin;
  await new Promise((resolve) => {
    const frame = (now) => {
      const elapsed = (now - begin) / 1000;
      while (number < elapsed * stepsASecond) step();
      if (elapsed > warmUpSeconds) gaps.push(now - last);
      else frameTimes.length = 0;
      last = now;
      if (elapsed < warmUpSeconds + seconds) requestAnimationFrame(frame);
      else resolve();
    };
    requestAnimationFrame(frame);
  });
  draws = [...frameTimes];
  const at = (values, share) => values.sort((a, b) => a - b)[Math.floor(values.length * share)];
  const both = (values) => ({ p50: at(values, 0.5), p95: at(values, 0.95) });
  return { draw: both(draws), gap: both(gaps), numSteps: number };
}
"""


def main() -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: the file that the documents quote")
    args = parser.parse_args()
    settings: dict[str, Any] = {"num_requests": NUM_REQUESTS, "num_running": NUM_RUNNING, "num_blocks": NUM_BLOCKS}
    settings |= {"steps_a_second": STEPS_A_SECOND, "seconds": SECONDS, "warm_up_seconds": WARM_UP_SECONDS}
    found = []
    with site() as address, launched() as browser:
        settings["browser"] = f"Chromium {browser.version}, headless, without a GPU"
        for _ in range(args.repeats):
            page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
            page.goto(f"{address}/visualizer/index.html?recording=../recordings/batching.jsonl")
            page.wait_for_function("() => window.visualizer.source?.player")
            found.append(page.evaluate(RUN, {_camel(key): value for key, value in settings.items()}))
            page.close()
    results: dict[str, Any] = {"recipe": recipe(repeats=args.repeats, **settings)}
    for figure in ("draw", "gap"):
        results[f"{figure}_ms"] = {p: spread([each[figure][p] for each in found]) for p in ("p50", "p95")}
    print(json.dumps({key: value for key, value in results.items() if key != "recipe"}, indent=1))
    args.out.write_text(json.dumps(results, indent=1) + "\n")


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


if __name__ == "__main__":
    main()
