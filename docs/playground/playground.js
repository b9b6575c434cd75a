/**
 * The playground: a setting, the visualizer's drawing of the run it gives, metrics, an editor and tasks.
 *
 * Nothing but small files is loaded at first: the presets' runs were made when the site was built. Python comes when the
 * reader asks for it. From then on every change of a dial gives a new run.
 * What this leaves out: everything that is simulated (`simulator/`, in Python), and the drawing (`../visualizer/`).
 */

import { make, setText } from "../visualizer/dom.js";
import { ChallengePanel } from "./challenges.js";
import { Editor } from "./editor.js";
import { layOut, missingOf } from "./layout.js";
import { Python, TooLongError } from "./python.js";
import { lifeLines, metricsTable } from "./results.js";
import { Dials, fromQuery, toQuery } from "./settings.js";
import { Drawing } from "./source.js";

const PAUSE = 250; // milliseconds after a change until it is run
const root = document.getElementById("playground");
const load = async (path) => {
  const response = await fetch(new URL(path, import.meta.url));
  if (!response.ok) {
    throw new Error(`There is no ${path} (HTTP ${response.status}).`);
  }
  return response.json();
};

class Playground {
  constructor(manifest, presets, solutions) {
    Object.assign(this, { manifest, presets, solutions });
    this.state = { milestone: presets[0].milestone, settings: { ...manifest.defaults }, edits: {}, challenge: null };
    this.before = null; // {metrics, milestone}: of the run before this one
    this.shown = null; // the answer that is shown
    this.isStarted = false;
    this.isTrusted = true; // false for code that came with the address, until the reader runs it
    this.isRunning = false;
    this.isStale = false; // something has changed since the run that is going on began
    this.timer = 0;
    this.functions = new Map(); // by milestone
    this.challenges = [];
    this.python = new Python(manifest, (share) => this.progress(share));
    this.build();
  }

  get canStart() {
    return missingOf(this.manifest).length === 0;
  }

  // The page.

  build() {
    this.dials = new Dials(this.manifest, this.state, () => this.changed());
    this.dials.disabled = true;
    this.editor = new Editor({
      onRun: () => {
        this.isTrusted = true;
        return this.run();
      },
      onChange: (edits) => this.edited(edits),
      onReset: () => this.resetAll(),
      onDiff: () => this.showDiffs(),
    });
    this.challengePanel = new ChallengePanel({
      onTake: (task) => this.take(task),
      onSolve: (task) => this.solve(task),
    });
    const parts = layOut(root, this.manifest, this, {
      onMilestone: (milestone) => this.chooseMilestone(milestone),
      onStart: () => this.start(),
      onCopy: () => this.copyLink(),
    });
    Object.assign(this, parts);
    this.drawing = new Drawing(this.frame, (colours) =>
      colours.forEach((colour, i) => root.style.setProperty(`--colour-${i}`, colour)),
    );
    this.showState();
  }

  progress(share) {
    this.bar.value = share;
    setText(this.startText, share < 1 ? `Loading Python: ${Math.round(100 * share)} %` : "Starting Python ...");
  }

  /** Bring tabs, presets and dials in line with the state. */
  showState() {
    const { milestone, challenge } = this.state;
    for (const tab of this.tabs.children) {
      tab.setAttribute("aria-pressed", String(tab.dataset.milestone === milestone));
    }
    const current = this.presetOf();
    const mine = this.presets.filter((preset) => preset.milestone === milestone);
    this.presetList.replaceChildren(
      ...mine.map((preset) =>
        make(
          "button",
          {
            type: "button",
            "data-preset": preset.id,
            "aria-pressed": String(preset === current),
            onclick: () => this.choosePreset(preset),
          },
          preset.title,
        ),
      ),
    );
    const task = this.challenges.find((each) => each.id === challenge);
    setText(this.presetText, current?.text ?? (task ? `Challenge: ${task.title}.` : "A setting of your own."));
    this.dials.state = this.state;
    this.dials.show(document.activeElement);
  }

  /** The preset that the state is, if it is one. */
  presetOf() {
    const { milestone, settings, edits } = this.state;
    const defaults = this.manifest.defaults;
    const same = (a, b) =>
      Object.keys(a).length === Object.keys(b).length && Object.keys(a).every((key) => a[key] === b[key]);
    return this.presets.find(
      (preset) =>
        preset.milestone === milestone &&
        same({ ...defaults, ...preset.settings }, settings) &&
        same(preset.edits, edits),
    );
  }

  // What the reader does.

  async chooseMilestone(milestone) {
    const first = this.presets.find((preset) => preset.milestone === milestone);
    await this.choosePreset(first);
  }

  async choosePreset(preset) {
    const settings = { ...this.manifest.defaults, ...preset.settings };
    await this.use({ milestone: preset.milestone, settings, edits: { ...preset.edits }, challenge: null });
  }

  /** Have another state, and show its run. */
  async use(state, isTrusted = true) {
    this.isTrusted = isTrusted;
    const isOther = state.milestone !== this.state.milestone;
    Object.assign(this.state, state);
    if (isOther) {
      this.before = null;
    }
    this.showState();
    this.showChallenges();
    await this.writeAddress();
    if (this.isStarted) {
      await this.openEditor();
      await this.run();
    } else {
      await this.showRecorded();
    }
  }

  /** A preset's run from the time of building, where there is one. */
  async showRecorded() {
    const preset = this.presetOf();
    if (preset) {
      const answer = await load(`runs/${preset.id}.json`);
      if (preset === this.presetOf() && !this.isStarted) {
        this.show({ ...answer, error: null, original: null, verdict: null, diffs: {}, printed: "" });
      }
    } else if (this.canStart) {
      const hasCode = Object.keys(this.state.edits).length > 0;
      const what = hasCode ? "a setting and code of its own" : "a setting of its own";
      this.say(`This link has ${what}. Start Python to ${hasCode ? "look at the code and to run it" : "run it"}.`);
    } else {
      this.say("This link has a setting of its own, which can't be run in this copy of the site.", "info");
    }
  }

  changed() {
    this.state.challenge = null;
    this.showState();
    this.soon();
  }

  edited(edits) {
    this.state.edits = edits;
    this.showState();
    void this.writeAddress();
  }

  async showDiffs() {
    const { milestone, edits } = this.state;
    this.editor.showDiffs((await this.python.ask({ do: "diffs", milestone, edits })).diffs);
  }

  resetAll() {
    this.isTrusted = true;
    this.state.edits = {};
    this.editor.use(this.state.milestone, this.functions.get(this.state.milestone), {});
    this.edited({});
    void this.run();
  }

  soon() {
    window.clearTimeout(this.timer);
    this.timer = window.setTimeout(() => {
      void this.writeAddress();
      void this.run();
    }, PAUSE);
  }

  async writeAddress() {
    const query = await toQuery(this.state, this.manifest.defaults);
    window.history.replaceState(null, "", `?${query}${window.location.hash}`);
  }

  async copyLink() {
    await this.writeAddress();
    try {
      await navigator.clipboard.writeText(window.location.href);
      setText(this.copyButton, "Copied");
    } catch {
      setText(this.copyButton, "The address bar has it");
    }
    window.setTimeout(() => setText(this.copyButton, "Copy the link"), 1500);
  }

  // Python.

  async start() {
    this.startButton.disabled = true;
    this.bar.hidden = false;
    const begin = performance.now();
    try {
      await Promise.all([this.python.start(), this.editor.codeMirror ?? this.editor.load()]);
      for (let milestone = null; milestone !== this.state.milestone;) {
        milestone = this.state.milestone; // the reader may choose another one meanwhile
        await this.openEditor();
      }
    } catch (error) {
      this.startButton.disabled = false;
      this.bar.hidden = true;
      setText(this.startText, `Python could not be started: ${error.message}`);
      return;
    }
    this.secondsToStart = (performance.now() - begin) / 1000;
    this.isStarted = true;
    this.dials.disabled = false;
    this.startPanel.hidden = true;
    this.lab.hidden = false;
    this.editor.codeMirror.refresh(); // it was hidden, and had no size
    this.say(null);
    this.showChallenges();
    if (!this.isTrusted) {
      this.editor.toggleDiff();
      this.say("This link has edited code. Look at it in the editor below, then press Run.", "info");
    } else {
      await this.run();
    }
  }

  async openEditor() {
    const { milestone, edits } = this.state;
    if (!this.functions.has(milestone)) {
      const answer = await this.python.ask({ do: "functions", milestone });
      this.functions.set(milestone, answer.functions);
      this.challenges = answer.challenges;
    }
    this.editor.use(milestone, this.functions.get(milestone), edits);
    const task = this.challenges.find((each) => each.id === this.state.challenge);
    if (task && Object.keys(edits).length === 0) {
      this.editor.open(task.functions[0]);
    }
  }

  /** Run the state; once more if it changes meanwhile. */
  async run() {
    if (!this.isStarted || !this.isTrusted) {
      return;
    }
    if (this.isRunning) {
      this.isStale = true;
      return;
    }
    this.isRunning = true;
    do {
      this.isStale = false;
      root.classList.add("running");
      const { milestone, settings, edits, challenge } = this.state;
      try {
        this.show(await this.python.ask({ do: "run", milestone, settings, edits, challenge }), milestone);
      } catch (error) {
        this.say(error.message, "alarm");
        if (error instanceof TooLongError) {
          await this.python.start();
        }
      }
    } while (this.isStale);
    this.isRunning = false;
    root.classList.remove("running");
  }

  // Results.

  show(answer, milestone = this.state.milestone) {
    this.editor.showDiffs(answer.diffs);
    this.output.hidden = !answer.printed;
    setText(this.output, answer.printed);
    if (answer.error) {
      this.say(answer.error.message, "alarm");
      if (answer.error.line !== null && answer.error.edit) {
        this.editor.mark(answer.error.edit, answer.error.line);
      }
      return;
    }
    const { failure, metrics, original } = answer;
    this.editor.unmark();
    if (failure) {
      this.showFailure(failure);
    } else {
      this.say(null);
    }
    // What has failed on the way has no figures to compare: it looks fast because it was not finished.
    const before = this.before?.milestone === milestone ? this.before.metrics : null;
    const other = failure ? null : (original ?? before);
    this.metrics.replaceChildren(metricsTable(metrics, other, original ? "Original files" : "The run before"));
    this.lives.replaceChildren(lifeLines(metrics));
    this.before = failure ? this.before : { metrics, milestone };
    this.shown = answer;
    if (this.state.challenge) {
      this.challengePanel.judge(answer, Object.keys(this.state.edits).length > 0);
    }
    void this.drawing.show(answer.messages, failure ? Math.max(failure.step, 0) : null);
  }

  showFailure({ step, kind, message, place }) {
    const what = { integrity: "check_integrity() failed", rule: "The engine can't do this", error: "The code raised" }[
      kind
    ];
    const where = place
      ? ` In ${place.file}, line ${place.line}${place.function ? ` (${place.function})` : ""}: ${place.text}`
      : "";
    this.say(`Step ${step}: ${what}: ${message.replace(/\.$/, "")}.${where}`, "alarm");
    if (place?.is_edited) {
      this.editor.mark(`${place.file}:${place.function}`, place.line_in_function);
    }
  }

  say(text, kind = "info") {
    for (const element of [this.notice, this.editor.notice]) {
      element.hidden = !text;
      element.dataset.kind = kind;
      setText(element, text ?? "");
    }
  }

  // Challenges.

  showChallenges() {
    const mine = this.challenges.filter((each) => each.milestone === this.state.milestone);
    this.challengePanel.show(
      mine,
      mine.find((each) => each.id === this.state.challenge),
    );
  }

  async take(task) {
    const settings = { ...this.manifest.defaults, ...task.settings };
    await this.use({ milestone: task.milestone, settings, edits: {}, challenge: task.id });
  }

  async solve(task) {
    const { edit, text } = this.solutions[task.id];
    const originals = new Map(this.functions.get(task.milestone).map((each) => [each.edit, each.text]));
    const edits = {};
    for (const [name, pairs] of Object.entries(edit)) {
      edits[name] = pairs.reduce(
        (source, [old, replacement]) => source.replace(old, () => replacement),
        originals.get(name),
      );
    }
    const settings = { ...this.manifest.defaults, ...task.settings };
    await this.use({ milestone: task.milestone, settings, edits, challenge: task.id });
    this.challengePanel.explain(text);
  }
}

async function begin() {
  const [manifest, solutions] = await Promise.all([load("manifest.json"), load("solutions.json")]);
  const playground = new Playground(manifest, manifest.presets, solutions);
  window.playground = playground;
  const query = new URLSearchParams(window.location.search);
  let state = null;
  try {
    state = await fromQuery(query, manifest);
  } catch {
    playground.say("The edited code in this link can't be read. The link was cut off, perhaps.", "alarm");
  }
  if (state === null) {
    await playground.choosePreset(manifest.presets[0]);
  } else if (Object.keys(state).length === 1) {
    await playground.chooseMilestone(state.milestone); // a link from a lesson
  } else {
    const isKnown = manifest.presets.some(({ edits }) => JSON.stringify(edits) === JSON.stringify(state.edits));
    await playground.use(state, isKnown);
  }
}

begin().catch((error) =>
  root.replaceChildren(make("p", { class: "notice" }, `The playground could not be loaded: ${error.message}`)),
);
