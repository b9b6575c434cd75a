/**
 * What a run has given: a table of metrics beside another run's, and a line for each request's life.
 *
 * What this leaves out: what the metrics mean in detail. The page says it below, and `simulator/metrics.py` works them out.
 */

import { labelOf, pickColour } from "../visualizer/colours.js";
import { make } from "../visualizer/dom.js";

const seconds = (value) => (value >= 1 ? `${value.toFixed(2)} s` : `${(value * 1000).toFixed(value < 0.1 ? 1 : 0)} ms`);
const whole = (value) => Math.round(value).toLocaleString("en");
const percent = (value) => `${Math.round(100 * value)} %`;
/** [name, what it says, how it is written, whether less is better (null: neither)] */
const ROWS = [
  ["mean_ttft", "TTFT, mean", seconds, true],
  ["max_ttft", "TTFT, longest", seconds, true],
  ["mean_tpot", "TPOT, mean", seconds, true],
  ["longest_gap", "Longest gap", seconds, true],
  ["tokens_per_s", "Tokens per second", (value) => value.toFixed(value < 10 ? 1 : 0), false],
  ["seconds", "Whole run", seconds, true],
  ["num_steps", "Steps", whole, null],
  ["num_preemptions", "Preemptions", whole, true],
  ["num_recomputed_tokens", "Tokens computed twice", whole, true],
  ["num_cached_tokens", "Tokens found in the cache", whole, false],
  ["num_draft_tokens", "Drafts", whole, null],
  ["num_accepted_tokens", "Drafts that were right", whole, false],
  ["mean_pool_use", "Pool in use, mean", percent, null],
  ["max_pool_use", "Pool in use, most", percent, null],
];

/** A table of a run's metrics, with those of another run if there is one. */
export function metricsTable(metrics, other, otherName) {
  const rows = ROWS.filter(([name]) => !/cached|draft|accepted/.test(name) || metrics[name] || other?.[name]);
  const head = ["", "This run", ...(other ? [otherName, "Change"] : [])];
  return make(
    "table",
    { class: "metrics" },
    make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col" }, text)))),
    make(
      "tbody",
      {},
      ...rows.map(([name, label, write, isLessBetter]) =>
        make(
          "tr",
          { "data-metric": name },
          make("th", { scope: "row" }, label),
          make("td", {}, write(metrics[name])),
          ...(other ? [make("td", {}, write(other[name])), change(metrics[name], other[name], isLessBetter)] : []),
        ),
      ),
    ),
  );
}

function change(value, before, isLessBetter) {
  const share = before === 0 ? (value === 0 ? 0 : Infinity) : value / before - 1;
  const text =
    Math.abs(share) < 0.005
      ? "="
      : share === Infinity
        ? "new"
        : `${share > 0 ? "+" : "−"}${Math.round(100 * Math.abs(share))} %`;
  const isBetter = isLessBetter === null || Math.abs(share) < 0.005 ? null : share < 0 === isLessBetter;
  return make("td", { class: isBetter === null ? null : isBetter ? "better" : "worse" }, text);
}

/** A line for each request: pale until its first token, full until its last. */
export function lifeLines(metrics) {
  const end = Math.max(metrics.seconds, 1e-9);
  const place = (moment) => `${(100 * moment) / end}%`;
  const recent = [];
  const rows = Object.entries(metrics.requests).map(([id, life], index) => {
    const colour = pickColour(id, recent);
    recent.unshift(colour);
    recent.length = Math.min(recent.length, 4);
    const first = life.ttft === null ? end : life.arrival + life.ttft;
    const last = life.end ?? end;
    const words = life.ttft === null ? "no token yet" : `first token after ${seconds(life.ttft)}`;
    const lost = life.num_preemptions ? `, lost its blocks ${life.num_preemptions}×` : "";
    const title = `${id}: ${life.num_prompt_tokens} + ${life.answer_len} tokens, ${words}${lost}`;
    const bar = (from, to, kind) => {
      const element = make("i", { class: kind });
      Object.assign(element.style, { left: place(from), width: `${(100 * Math.max(to - from, 0)) / end}%` });
      return element;
    };
    const row = make(
      "li",
      { title },
      make("b", {}, labelOf(index)),
      make("span", { class: "line" }, bar(life.arrival, first, "wait"), bar(first, last, "write")),
      make("span", { class: "ttft" }, life.ttft === null ? "–" : seconds(life.ttft)),
    );
    row.style.setProperty("--colour", `var(--colour-${colour})`);
    return row;
  });
  return make(
    "ol",
    { class: "lives", "aria-label": "Each request: its wait for the first token, and its answer" },
    ...rows,
  );
}
