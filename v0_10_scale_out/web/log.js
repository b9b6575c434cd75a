/**
 * The event log, with filters by kind and by request.
 *
 * Only the lines in sight are elements: they are moved and written again as the log scrolls or grows.
 * What this leaves out: events beyond the newest ones that the state keeps; a recording has them all.
 */

import { byId, make, say, setAttribute, setText } from "./dom.js";
import { nameOf } from "./state.js";
import { describe, grouped } from "./words.js";

const LINE = 24; // pixels
const PAUSE = 100; // milliseconds between two drawings of what comes by itself
const KINDS = [
  ["Requests", ["request_queued", "request_admitted", "request_forked", "request_finished", "request_aborted"]],
  ["Preemptions", ["request_preempted"]],
  ["Prefill", ["prefill_chunk"]],
  ["Tokens", ["first_token", "decode"]],
  ["Drafts", ["speculative_round"]],
  [
    "Blocks",
    ["block_allocated", "block_shared", "block_copied", "block_cached", "block_evicted", "block_freed", "cache_reset"],
  ],
  ["Steps", ["step"]],
  ["Engine", ["snapshot", "pace_changed"]],
];

export class LogPanel {
  constructor(view) {
    this.view = view;
    this.hidden = new Set(); // types of events
    this.list = []; // the messages that pass the filters
    this.numSeen = 0; // of the state's `numLogged`
    this.root = byId("log");
    this.spacer = make("div", { class: "log-spacer" });
    this.root.append(this.spacer);
    this.lines = [];
    this.atEnd = true;
    this.state = null;
    this.height = 0;
    this.time = -Infinity;
    this.isStale = false;
    this.buildTools();
    this.root.addEventListener("scroll", () => {
      this.atEnd = this.root.scrollTop + this.root.clientHeight >= this.root.scrollHeight - LINE;
      view.onChange("scroll");
    });
    new ResizeObserver(() => {
      this.height = this.root.clientHeight;
      this.draw();
    }).observe(this.root);
  }

  buildTools() {
    const tools = byId("log-tools");
    for (const [name, types] of KINDS) {
      const button = make("button", { type: "button", class: "toggle", "aria-pressed": "true" }, name);
      button.addEventListener("click", () => {
        const isOn = button.getAttribute("aria-pressed") === "true";
        types.forEach((type) => (isOn ? this.hidden.add(type) : this.hidden.delete(type)));
        setAttribute(button, "aria-pressed", !isOn);
        this.refilter();
      });
      tools.append(button);
    }
    this.select = make(
      "select",
      { "aria-label": "Events of which request" },
      make("option", { value: "" }, "All requests"),
    );
    this.select.addEventListener("pointerdown", () => this.fillSelect());
    this.select.addEventListener("focus", () => this.fillSelect());
    this.select.addEventListener("change", () => this.view.filterLog(this.select.value || null));
    tools.append(this.select);
  }

  /** Offer the requests that the state knows, when the reader is about to choose. */
  fillSelect() {
    const options = [["", "All requests"]];
    this.state?.requests.forEach((request) => options.push([request.id, `${request.label}  ${request.id}`]));
    if (this.view.logRequest && !this.state?.requests.has(this.view.logRequest)) {
      options.push([this.view.logRequest, this.view.logRequest]);
    }
    if (options.length !== this.select.options.length) {
      this.select.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
    }
    this.select.value = this.view.logRequest ?? "";
  }

  passes(message) {
    const id = this.view.logRequest;
    return !this.hidden.has(message.type) && (id === null || message.request_id === id || concerns(message, id));
  }

  refilter() {
    this.list = (this.state?.log ?? []).filter((message) => this.passes(message));
    this.numSeen = this.state?.numLogged ?? 0;
    this.fillSelect();
    this.draw();
  }

  /** Returns whether it has something newer to show later. */
  render(state, dirty, now) {
    const isOther = this.state !== state;
    this.state = state;
    if (isOther || dirty.all) {
      this.refilter();
    } else if (dirty.log) {
      const numNew = Math.min(state.numLogged - this.numSeen, state.log.length);
      this.numSeen = state.numLogged;
      for (let i = state.log.length - numNew; i < state.log.length; i++) {
        if (this.passes(state.log[i])) {
          this.list.push(state.log[i]);
        }
      }
      if (this.list.length > 2500) {
        this.list = this.list.slice(-2000);
      }
      this.isStale = true;
    }
    if (this.isStale && now - this.time >= PAUSE) {
      this.time = now;
      this.draw();
    }
    return this.isStale;
  }

  /** Write the lines in sight. */
  draw() {
    this.isStale = false;
    const { height } = this;
    const total = this.list.length * LINE;
    if (total !== this.total) {
      this.total = total;
      this.spacer.style.height = `${total}px`;
      setText(byId("log-summary"), this.state ? `the newest ${grouped(this.list.length)}` : "");
    }
    const top = this.atEnd ? Math.max(0, total - height) : this.root.scrollTop;
    if (this.atEnd && Math.abs(this.root.scrollTop - top) > 1) {
      this.root.scrollTop = top;
    }
    const first = Math.floor(top / LINE);
    const numLines = Math.min(Math.ceil(height / LINE) + 1, this.list.length);
    while (this.lines.length < numLines) {
      const line = {
        message: null,
        element: make("div", { class: "log-line" }),
        time: make("time"),
        words: make("span"),
      };
      line.element.append(line.time, line.words);
      this.root.append(line.element);
      this.lines.push(line);
    }
    this.lines.forEach((line, i) => {
      const message = i < numLines ? this.list[first + i] : undefined;
      line.element.hidden = message === undefined;
      if (message !== undefined) {
        line.element.style.transform = `translateY(${(first + i) * LINE}px)`;
        if (line.message !== message) {
          this.write(line, message);
        }
      }
    });
  }

  write(line, message) {
    line.message = message;
    setText(line.time, `${message.time.toFixed(3)} s`);
    setAttribute(line.element, "data-type", message.type);
    say(
      line.words,
      describe(message, (id) => ({ id, ...nameOf(this.state, id) })),
    );
  }
}

/** Whether a message is about a request, though not in its first place. */
function concerns(message, id) {
  return (
    message.for_request_id === id ||
    message.from_request_id === id ||
    (message.type === "step" && message.scheduled.some((part) => part.request_id === id))
  );
}
