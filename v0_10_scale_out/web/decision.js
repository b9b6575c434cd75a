/**
 * A step's decision in words, beside the timeline: the chosen step's, or the newest one's while nothing is chosen.
 *
 * The newest one's is written four times a second at most: nobody reads faster, and a screen reader is left in peace.
 * What this leaves out: the sentences themselves (`words.js`).
 */

import { byId, make, say, setAttribute } from "./dom.js";
import { findStep } from "./steps.js";
import { decide, milliseconds } from "./words.js";

const PAUSE = 250; // milliseconds
const PARTS = [
  ["schedule", "schedule"],
  ["run", "model"],
  ["update", "update"],
  ["output", "output"],
];

export class Decision {
  constructor(view) {
    this.view = view;
    this.root = byId("decision");
    this.shown = null;
    this.wasFixed = false;
    this.time = -Infinity;
    this.onGo = null; // set by a replay: be at this step
  }

  /** Returns whether it has something newer to show later. */
  render(state, dirty, now) {
    const { steps } = state;
    const index = this.view.step === null ? steps.length - 1 : findStep(steps, this.view.step);
    const step = steps[index] ?? null;
    const isFixed = this.view.step !== null;
    if (step === this.shown && isFixed === this.wasFixed && this.root.firstChild) {
      return false;
    }
    if (!isFixed && !dirty.all && this.shown !== null && now - this.time < PAUSE) {
      return true;
    }
    this.time = now;
    this.shown = step;
    this.wasFixed = isFixed;
    setAttribute(this.root, "aria-live", isFixed ? "polite" : "off");
    setAttribute(this.root, "data-step", step?.number ?? null);
    if (step === null) {
      this.root.replaceChildren(make("p", { class: "empty" }, "No step yet. Each step of the engine becomes a bar."));
      return false;
    }
    const title = make("h3", {}, `Step ${step.number}`, make("span", {}, ` at ${step.time.toFixed(2)} s`));
    if (this.onGo && isFixed) {
      const onclick = () => this.onGo(step.number);
      title.append(make("button", { type: "button", class: "link", onclick }, "Go there"));
    }
    const sentences = decide(step).map((parts) => say(make("li"), parts));
    this.root.replaceChildren(title, ...durations(step.seconds), make("ul", {}, ...sentences));
    return false;
  }
}

/** How long a step took, as a split bar and as figures. */
function durations(seconds) {
  const bar = make("div", { class: "split", "aria-hidden": "true" });
  const words = make("p", { class: "split-words" }, make("b", {}, milliseconds(seconds.all)), " in all: ");
  PARTS.forEach(([key, name], i) => {
    const piece = make("i", { class: `split-${key}` });
    piece.style.flexGrow = seconds[key] / Math.max(seconds.all, 1e-9);
    bar.append(piece);
    const figure = make("span", {}, make("i", { class: `split-${key}` }), `${name} ${milliseconds(seconds[key])}`);
    words.append(i > 0 ? " " : "", figure);
  });
  return [bar, words];
}
