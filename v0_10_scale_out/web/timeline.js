/**
 * The timeline: one bar a step, as high as its token budget; the newest at the right, until the reader looks back.
 *
 * A click or the arrow keys choose a step, whose decision is shown beside it (`decision.js`); Escape follows the newest
 * again. What this leaves out: the drawing of the bars (`bars.js`), and steps that the state has forgotten.
 */

import { drawBars, layoutOf } from "./bars.js";
import { byId, make, setAttribute, setText } from "./dom.js";
import { findStep } from "./steps.js";
import { palette } from "./theme.js";
import { plural } from "./words.js";

const WIDTHS = [6, 10, 16, 24, 40]; // of a bar, in pixels

export class Timeline {
  constructor(view) {
    this.view = view;
    this.steps = [];
    this.zoom = window.innerWidth < 600 ? 1 : 2;
    this.isLinear = false;
    this.last = null; // the number of the step at the right edge, or null: the newest
    this.hover = null; // what the pointer is on: {step, id}
    this.pressed = null; // where the pointer went down
    this.stale = true;
    this.size = [0, 0]; // of the drawing, in pixels
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.root = byId("timeline");
    this.root.append(this.canvas);
    for (const [name, value] of Object.entries({
      role: "slider",
      tabindex: 0,
      "aria-label": "Step",
      "aria-valuemin": 0,
    })) {
      setAttribute(this.root, name, value);
    }
    this.buildTools();
    this.listen();
    new ResizeObserver(() => {
      this.size = [this.root.clientWidth, this.root.clientHeight];
      this.touch();
    }).observe(this.root);
  }

  buildTools() {
    const button = (text, label, onclick) =>
      make("button", { type: "button", class: "quiet", "aria-label": label, onclick }, text);
    this.followButton = button("Newest", "Follow the newest step", () => this.choose(null));
    this.scaleButton = make("button", { type: "button", class: "quiet", "aria-pressed": "false" }, "Linear scale");
    this.scaleButton.addEventListener("click", () => {
      this.isLinear = !this.isLinear;
      setAttribute(this.scaleButton, "aria-pressed", this.isLinear);
      this.touch();
    });
    byId("timeline-tools").append(
      this.followButton,
      this.scaleButton,
      button("−", "Narrower bars", () => this.setZoom(-1)),
      button("+", "Wider bars", () => this.setZoom(1)),
    );
  }

  listen() {
    this.root.addEventListener("keydown", (event) => this.press(event));
    this.root.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => {
      this.pressed = { x: event.offsetX, right: this.rightEdge(), moved: false };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerup", (event) => {
      if (this.pressed && !this.pressed.moved) {
        const step = this.layout().stepAt(event.offsetX);
        this.choose(step === null ? null : step.number);
      }
      this.pressed = null;
    });
    this.canvas.addEventListener("pointerleave", () => this.setHover(null));
  }

  touch() {
    this.stale = true;
    this.view.onChange("timeline");
  }

  setZoom(change) {
    this.zoom = Math.min(Math.max(this.zoom + change, 0), WIDTHS.length - 1);
    this.touch();
  }

  /** The index of the step at the right edge. */
  rightEdge() {
    const index = this.last === null ? -1 : findStep(this.steps, this.last);
    return index < 0 ? this.steps.length - 1 : index;
  }

  layout() {
    return layoutOf(this.steps, this.rightEdge(), WIDTHS[this.zoom], ...this.size, this.isLinear);
  }

  /** Choose the step of a number, and bring it into sight; null follows the newest. */
  choose(number) {
    const index = number === null ? -1 : findStep(this.steps, number);
    const { first, last } = this.layout();
    if (index < 0) {
      this.last = null;
    } else if (index < first) {
      this.last = this.steps[Math.min(index + (last - first), this.steps.length - 1)].number;
    } else {
      this.last = this.steps[Math.max(index, this.rightEdge())].number; // the bars stand still
    }
    this.view.choose(index < 0 ? null : number);
    this.touch();
  }

  /** Look `change` steps further to the right. */
  scroll(change, from = this.rightEdge()) {
    const right = Math.min(
      Math.max(from + change, Math.min(this.layout().capacity, this.steps.length) - 1),
      this.steps.length - 1,
    );
    this.last = right >= this.steps.length - 1 && this.view.step === null ? null : (this.steps[right]?.number ?? null);
    this.touch();
  }

  wheel(event) {
    const change = Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : event.shiftKey ? event.deltaY : 0;
    if (change !== 0) {
      event.preventDefault();
      this.scroll(Math.sign(change) * Math.ceil(Math.abs(change) / WIDTHS[this.zoom]));
    }
  }

  point(event) {
    if (this.pressed && Math.abs(event.offsetX - this.pressed.x) > 4) {
      this.pressed.moved = true;
      this.scroll(Math.round((this.pressed.x - event.offsetX) / WIDTHS[this.zoom]), this.pressed.right);
    } else if (!this.pressed) {
      this.setHover(this.layout().partAt(event.offsetX, event.offsetY));
    }
  }

  setHover(hover) {
    if (hover?.step !== this.hover?.step || hover?.id !== this.hover?.id) {
      this.hover = hover;
      this.view.light(hover?.id ? [hover.id] : []);
      this.touch();
    }
  }

  press(event) {
    const index = this.view.step === null ? this.steps.length - 1 : findStep(this.steps, this.view.step);
    const targets = {
      ArrowLeft: index - 1,
      ArrowRight: index + 1,
      PageUp: index - 10,
      PageDown: index + 10,
      Home: 0,
      End: this.steps.length - 1,
    };
    if (event.key === "Escape") {
      this.choose(null);
    } else if (targets[event.key] !== undefined && this.steps.length > 0) {
      event.preventDefault();
      const target = Math.min(Math.max(targets[event.key], 0), this.steps.length - 1);
      this.choose(this.steps[target].number);
    }
  }

  render(state, dirty) {
    this.steps = state.steps;
    if (!dirty.steps && !this.stale) {
      return;
    }
    this.stale = false;
    if (this.view.step !== null && findStep(this.steps, this.view.step) < 0) {
      this.last = null;
      this.view.choose(null); // it is forgotten, or not played yet
    }
    const layout = this.layout();
    const chosen = this.view.step ?? this.steps.at(-1)?.number ?? null;
    drawBars(this.canvas, layout, palette(), {
      chosen,
      isFixed: this.view.step !== null,
      hover: this.hover,
      lit: this.view.lit,
    });
    setAttribute(this.followButton, "aria-pressed", this.view.step === null && this.last === null);
    const newest = this.steps.at(-1);
    setAttribute(this.root, "aria-valuemax", newest?.number ?? 0);
    setAttribute(this.root, "aria-valuenow", chosen ?? 0);
    setAttribute(this.root, "aria-valuetext", chosen === null ? "no steps yet" : `step ${chosen}`);
    const text = newest ? `one bar a step, up to its budget of ${plural(newest.budget, "token")}` : "";
    setText(byId("timeline-summary"), text);
  }
}
