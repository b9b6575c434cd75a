/**
 * The head of the page: connection, model, key figures.
 *
 * What this leaves out: history. The charts have it.
 */

import { ratesOf } from "./charts.js";
import { byId, make, setAttribute, setText } from "./dom.js";
import { grouped } from "./words.js";

const FIGURES = [
  ["step", "Step"],
  ["running", "Running"],
  ["waiting", "Waiting"],
  ["blocks", "Blocks in use"],
  ["throughput", "Tokens/s"],
  ["cached", "Prompt cached"],
  ["preemptions", "Preemptions"],
];
const PAUSE = 100; // milliseconds

export class Header {
  constructor() {
    this.time = -Infinity;
    this.values = {};
    for (const [key, name] of FIGURES) {
      this.values[key] = make("dd", { "data-figure": key }, "–");
      byId("figures").append(make("div", { class: "figure" }, make("dt", {}, name), this.values[key]));
    }
  }

  /** The connection, in a word and in a sentence. */
  status({ state, text, detail }) {
    const element = byId("connection");
    setAttribute(element, "data-state", state);
    setText(element, text);
    setAttribute(element, "title", detail ?? text);
  }

  /** Returns whether it has something newer to show later. */
  render(state, dirty, now) {
    if (now - this.time < PAUSE && !dirty.all) {
      return true;
    }
    this.time = now;
    if (!state.ready) {
      return false;
    }
    setText(byId("model"), `${state.model} · ${state.milestone}`);
    let [running, waiting, used] = [0, 0, 0];
    for (const request of state.requests.values()) {
      running += request.state === "prefill" || request.state === "decode";
      waiting += request.state === "waiting" || request.state === "preempted";
    }
    for (const block of state.blocks) {
      used += block.owners.length > 0;
    }
    const { prompt, cached, preemptions } = state.totals;
    const written = ratesOf(state.steps.slice(-400)).at(-1)?.written ?? 0;
    const texts = {
      step: state.step < 0 ? "–" : grouped(state.step),
      running: grouped(running),
      waiting: grouped(waiting),
      blocks: `${grouped(used)} / ${grouped(state.blocks.length)}`,
      throughput: written.toFixed(written < 10 ? 1 : 0),
      cached: prompt > 0 ? `${Math.round((100 * cached) / prompt)} %` : "–",
      preemptions: grouped(preemptions),
    };
    Object.entries(texts).forEach(([key, text]) => setText(this.values[key], text));
    return false;
  }
}
