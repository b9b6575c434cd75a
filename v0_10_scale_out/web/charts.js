/**
 * Four small charts over the last seconds: tokens a second, requests running and waiting, blocks in use, drafts right.
 *
 * Their time is the events' own, so that a replay shows what was. They are drawn four times a second at most.
 * What this leaves out: axes with many numbers. The newest value is written large, the largest small.
 */

import { byId, make, makeSvg, setAttribute, setText } from "./dom.js";

const SPAN = 30; // seconds in sight
const WINDOW = 2; // seconds that a rate is taken over
const PAUSE = 250; // milliseconds between two drawings
const [WIDTH, HEIGHT] = [280, 72];

const percent = (share) => `${Math.round(100 * share)} %`;

/** What each chart shows: lines of values, one for each step in sight. */
const CHARTS = [
  {
    name: "Throughput",
    unit: "tokens/s written",
    lines: [["main", (step, rates) => rates.written]],
    text: ([value]) => value.toFixed(value < 10 ? 1 : 0),
  },
  {
    name: "Queue",
    unit: "running (line), waiting (dashed)",
    lines: [
      ["main", (step) => step.numRunning],
      ["second", (step) => step.numWaiting],
    ],
    text: ([running, waiting]) => `${running} + ${waiting}`,
  },
  {
    name: "KV cache",
    unit: "blocks in use",
    top: 1,
    lines: [["main", (step) => 1 - step.numFree / Math.max(step.numBlocks, 1)]],
    text: ([share]) => percent(share),
  },
  {
    name: "Drafts",
    unit: "of them right",
    top: 1,
    onlyWithDrafts: true,
    lines: [["main", (step, rates) => rates.acceptance]],
    text: ([share]) => percent(share),
  },
];

/** Tokens written a second, and the share of drafts that were right, over the window that ends with each step. */
export function ratesOf(steps) {
  let start = 0;
  const sums = { numWritten: 0, numDrafts: 0, numAccepted: 0 };
  const add = (step, sign) => Object.keys(sums).forEach((key) => (sums[key] += sign * step[key]));
  return steps.map((step) => {
    add(step, 1);
    while (steps[start].time < step.time - WINDOW) {
      add(steps[start], -1);
      start += 1;
    }
    const acceptance = sums.numDrafts > 0 ? sums.numAccepted / sums.numDrafts : 0;
    return { written: sums.numWritten / WINDOW, acceptance };
  });
}

export class Charts {
  constructor() {
    this.time = -Infinity;
    this.stale = true;
    this.charts = CHARTS.map((chart) => {
      const value = make("b", {}, "–");
      const paths = chart.lines.map(([kind]) => makeSvg("path", { class: `chart-line ${kind}` }));
      const area = makeSvg("path", { class: "chart-area" });
      const box = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" };
      const svg = makeSvg("svg", box, area, ...paths);
      const title = make("p", { class: "chart-title" }, make("span", {}, chart.name), value);
      const element = make("figure", { class: "panel chart", "data-chart": chart.name }, title, svg);
      const unit = make("figcaption", {}, chart.unit);
      element.append(unit);
      return { ...chart, value, paths, area, element, unit };
    });
    byId("charts").append(...this.charts.map((chart) => chart.element));
  }

  /** Returns whether it has something newer to show later. */
  render(state, dirty, now) {
    this.stale ||= dirty.steps || dirty.all;
    if (!this.stale || (now - this.time < PAUSE && !dirty.all)) {
      return this.stale;
    }
    this.time = now;
    this.stale = false;
    const end = state.time;
    const from = state.steps.findIndex((step) => step.time >= end - SPAN - WINDOW);
    const steps = from < 0 ? [] : state.steps.slice(from);
    const rates = ratesOf(steps);
    const hasDrafts = Boolean(state.settings.speculative_method) || state.totals.drafts > 0;
    for (const chart of this.charts) {
      chart.element.hidden = chart.onlyWithDrafts === true && !hasDrafts;
      if (!chart.element.hidden) {
        draw(chart, steps, rates, end);
      }
    }
    return false;
  }
}

function draw(chart, steps, rates, end) {
  const values = chart.lines.map(([, valueOf]) => steps.map((step, i) => valueOf(step, rates[i])));
  const most = chart.top ?? Math.max(1, ...values.flat()) * 1.1;
  const span = Math.min(SPAN, Math.max(5, end - (steps[0]?.time ?? end))); // a short run fills the chart as well
  const x = (i) => (WIDTH * (1 - (end - steps[i].time) / span)).toFixed(1);
  const y = (value) => (HEIGHT - 2 - (value / most) * (HEIGHT - 6)).toFixed(1);
  const every = Math.max(1, Math.floor(steps.length / 400));
  values.forEach((line, number) => {
    const points = [];
    line.forEach((value, i) => {
      if (i % every === 0 || i === line.length - 1) {
        points.push(`${x(i)},${y(value)}`);
      }
    });
    setAttribute(chart.paths[number], "d", points.length > 1 ? `M${points.join("L")}` : null);
    if (number === 0) {
      const area =
        points.length > 1 ? `M${x(0)},${HEIGHT}L${points.join("L")}L${x(steps.length - 1)},${HEIGHT}Z` : null;
      setAttribute(chart.area, "d", area);
    }
  });
  const newest = values.map((line) => line.at(-1));
  setText(chart.value, steps.length > 0 ? chart.text(newest) : "–");
}
