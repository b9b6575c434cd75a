/**
 * The panel that asks the engine for something: answers to prompts, presets, and another pace.
 *
 * A browser holds six connections to a server. So prompts of plain text go in one request, however many there are; chat
 * messages need one each. What this leaves out: the answers, which appear among the requests.
 */

import { byId, make, notify, setAttribute, setText } from "./dom.js";
import { fillThePool, oneQuestion, sharedPrefix } from "./presets.js";
import { pace, plural } from "./words.js";

const DELAYS = [0, 0.05, 0.1, 0.2, 0.5, 1, 2]; // seconds after each step
const MAX_CHATS = 6;

export class Controls {
  constructor(engine) {
    this.engine = engine;
    this.settings = null;
    this.ignoreEnd = false;
    this.leaderFirst = false;
    this.root = byId("control");
    this.root.hidden = false;
    this.root.replaceChildren(this.buildPrompts(), this.buildPace());
  }

  buildPrompts() {
    this.prompts = make("textarea", {
      id: "prompts",
      rows: 3,
      placeholder: "One prompt a line",
      "aria-label": "Prompts, one a line",
    });
    this.prompts.addEventListener("input", () => this.edited());
    this.prompts.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        this.submit();
      }
    });
    this.maxTokens = make("input", { id: "max-tokens", type: "number", min: 1, value: 64, inputmode: "numeric" });
    this.temperature = make("input", { id: "temperature", type: "number", min: 0, max: 2, step: 0.1, value: 0 });
    const options = [
      ["chat", "chat message"],
      ["text", "plain text"],
    ].map(([value, text]) => make("option", { value }, text));
    this.mode = make("select", { id: "mode" }, ...options);
    this.mode.addEventListener("change", () => this.edited());
    this.send = make(
      "button",
      { type: "button", id: "submit", class: "primary", onclick: () => this.submit() },
      "Submit",
    );
    this.cancelButton = make("button", { type: "button", class: "quiet", onclick: () => this.cancel() }, "Abort mine");
    this.cancelButton.hidden = true;
    this.hint = make("p", { class: "hint", role: "status" });
    const preset = (id, text, title, makePreset) =>
      make(
        "button",
        { type: "button", id, title, class: "quiet preset", onclick: () => this.usePreset(makePreset) },
        text,
      );
    this.presets = [
      preset("preset-question", "One question", "Watch one request from its prompt to its answer", oneQuestion),
      preset("preset-shared", "Shared prefix", "Eight prompts with one long beginning share its blocks", sharedPrefix),
      preset("preset-fill", "Fill the pool", "More than the pool can hold: some requests are preempted", fillThePool),
    ];
    const field = (label, input) => make("label", { class: "field" }, make("span", {}, label), input);
    return make(
      "div",
      { class: "ask" },
      make("div", { class: "presets" }, make("span", { class: "label" }, "Try"), ...this.presets),
      this.prompts,
      make(
        "div",
        { class: "fields" },
        field("Max tokens", this.maxTokens),
        field("Temperature", this.temperature),
        field("Send as", this.mode),
        this.send,
        this.cancelButton,
      ),
      this.hint,
    );
  }

  buildPace() {
    const button = (id, text, onclick) => make("button", { type: "button", id, onclick }, text);
    this.pauseButton = button("pause", "Pause", () => this.control({ paused: !this.isPaused }));
    this.stepButton = button("step", "One step", () => this.control({ steps: 1 }));
    this.slow = make("input", { id: "slow", type: "range", min: 0, max: DELAYS.length - 1, step: 1, value: 0 });
    this.slowText = make("output", { for: "slow" }, "off");
    this.slow.addEventListener("input", () => this.showDelay(DELAYS[this.slow.value]));
    this.slow.addEventListener("change", () => this.control({ delay: DELAYS[this.slow.value] }));
    this.paceHint = make("p", { class: "hint", id: "pace-hint" });
    this.pace = make(
      "fieldset",
      { class: "pace", id: "pace", disabled: true, "aria-describedby": "pace-hint" },
      make("legend", { class: "label" }, "Pace"),
      make("div", { class: "buttons" }, this.pauseButton, this.stepButton),
      make("label", { class: "field wide" }, make("span", {}, "Slow motion: ", this.slowText), this.slow),
      this.paceHint,
    );
    return this.pace;
  }

  render(state, dirty) {
    if (!state.ready || !(dirty.all || dirty.pace)) {
      return;
    }
    this.settings = state.settings;
    this.isPaused = state.pace.paused;
    const isAllowed = state.settings.allow_control === true;
    this.pace.disabled = !isAllowed;
    this.stepButton.disabled = !this.isPaused;
    setText(this.pauseButton, this.isPaused ? "Resume" : "Pause");
    setAttribute(this.pauseButton, "aria-pressed", this.isPaused);
    setText(
      this.paceHint,
      isAllowed ? pace(state.pace) : "Start the server with --allow-control to pause it, or to slow it down.",
    );
    const nearest = DELAYS.findLastIndex((delay) => delay <= state.pace.delay);
    if (document.activeElement !== this.slow) {
      this.slow.value = nearest;
    }
    this.showDelay(state.pace.delay);
    this.maxTokens.max = state.settings.max_model_len;
  }

  showDelay(delay) {
    const text = delay > 0 ? `${delay} s between steps` : "off";
    setText(this.slowText, text);
    setAttribute(this.slow, "aria-valuetext", text);
  }

  /** What the reader has typed is no preset any more. */
  edited() {
    this.ignoreEnd = false;
    this.leaderFirst = false;
    this.setHint();
  }

  setHint() {
    const numPrompts = this.lines().length;
    const isLate = this.mode.value === "chat" && numPrompts > MAX_CHATS;
    const late = `A browser sends ${MAX_CHATS} chat messages at a time, the others later. Plain text goes all at once.`;
    setText(this.hint, isLate ? late : "");
    setText(this.send, numPrompts > 1 ? `Submit ${numPrompts} prompts` : "Submit");
  }

  lines() {
    return this.prompts.value.split("\n").filter((line) => line.trim() !== "");
  }

  usePreset(makePreset) {
    if (this.settings === null) {
      notify("The page has to be connected first: the preset's length follows from the engine's pool.");
      return;
    }
    const preset = makePreset(this.settings);
    this.prompts.value = preset.prompts.join("\n");
    this.maxTokens.value = preset.maxTokens;
    this.mode.value = preset.mode;
    this.setHint();
    Object.assign(this, { ignoreEnd: preset.ignoreEnd, leaderFirst: preset.leaderFirst });
    const first = preset.leaderFirst ? " The first goes ahead, so that the others find its blocks." : "";
    setText(
      this.hint,
      `${plural(preset.prompts.length, "prompt")} of about ${preset.prompts[0].split(" ").length} words.${first}`,
    );
    this.send.focus();
  }

  async submit() {
    const prompts = this.lines();
    if (prompts.length === 0) {
      notify("There is no prompt yet: type one a line, or choose a preset.");
      this.prompts.focus();
      return;
    }
    const common = { max_tokens: Number(this.maxTokens.value), temperature: Number(this.temperature.value) };
    if (this.ignoreEnd) {
      common.ignore_eos = true;
    }
    notify(null);
    if (this.mode.value === "chat") {
      const bodies = prompts.map((content) => ({ ...common, messages: [{ role: "user", content }] }));
      await Promise.all(bodies.map((body) => this.ask("v1/chat/completions", body)));
    } else if (this.leaderFirst && prompts.length > 1) {
      let others = null;
      const follow = () => (others ??= this.ask("v1/completions", { ...common, prompt: prompts.slice(1) }));
      await this.ask("v1/completions", { ...common, prompt: prompts[0] }, follow);
      await others;
    } else {
      await this.ask("v1/completions", { ...common, prompt: prompts.length === 1 ? prompts[0] : prompts });
    }
  }

  async ask(path, body, onFirst) {
    try {
      const answer = this.engine.submit(path, body, onFirst);
      this.cancelButton.hidden = false;
      await answer;
    } catch (error) {
      notify(explain(error));
    } finally {
      this.cancelButton.hidden = this.engine.running.size === 0;
    }
  }

  cancel() {
    this.engine.cancel();
    this.cancelButton.hidden = true;
  }

  async control(change) {
    try {
      await this.engine.control(change);
      notify(null);
    } catch (error) {
      notify(explain(error));
    }
  }
}

/** What an error of a request means to a reader. */
export function explain(error) {
  return error instanceof TypeError ? "The server can't be reached. Is it still running?" : error.message;
}
