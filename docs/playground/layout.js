/**
 * The page's elements, in their places. What they say and do comes from `playground.js`.
 *
 * What this leaves out: the parts with a file of their own (dials, editor, challenges), which are put in.
 */

import { make } from "../visualizer/dom.js";

const NAMES = { pyodide: "Pyodide, which is Python for the browser", codemirror: "CodeMirror, the editor" };

/** Put everything into `root`, and return what is needed later by its name. */
export function layOut(root, manifest, { dials, editor, challengePanel }, { onMilestone, onStart, onCopy }) {
  const button = (text, attributes, onclick) => make("button", { type: "button", ...attributes, onclick }, text);
  const tabs = Object.entries(manifest.milestones).map(([milestone, title]) =>
    button(title, { "data-milestone": milestone }, () => onMilestone(milestone)),
  );
  const parts = {
    tabs: make("div", { class: "tabs", role: "group", "aria-label": "Milestone" }, ...tabs),
    presetList: make("div", { class: "presets", role: "group", "aria-label": "Presets" }),
    presetText: make("p", { class: "preset-text" }),
    startButton: button("Start Python", { class: "md-button md-button--primary", id: "start" }, onStart),
    bar: make("progress", { max: 1, value: 0, hidden: true, "aria-label": "Loading Python" }),
    startText: make("p", { class: "start-text", role: "status" }, beforeStart(manifest)),
    notice: make("p", { class: "notice", role: "alert", hidden: true }),
    copyButton: button("Copy the link", { class: "link-button", id: "copy" }, onCopy),
    frame: make("iframe", {
      src: "../visualizer/index.html?simulated&embed",
      title: "The run, drawn",
      class: "drawing-frame",
    }),
    metrics: make("div", { class: "metrics-host" }),
    lives: make("div", { class: "lives-host" }),
    output: make("pre", {
      class: "printed",
      hidden: true,
      tabindex: 0,
      "aria-label": "What the edited code has printed",
    }),
    lab: make("div", { class: "lab", hidden: true }, editor.element, challengePanel.element),
  };
  parts.startButton.hidden = missingOf(manifest).length > 0;
  parts.startPanel = make("div", { class: "start" }, parts.startButton, parts.bar, parts.startText);
  const setting = make(
    "details",
    { class: "setting", open: window.innerWidth >= 960 },
    make("summary", {}, "Setting"),
    dials.element,
    parts.copyButton,
  );
  root.replaceChildren(
    parts.tabs,
    parts.presetList,
    parts.presetText,
    parts.startPanel,
    parts.notice,
    make("div", { class: "table" }, setting, make("div", { class: "drawing-host" }, parts.frame)),
    make("div", { class: "outcome" }, parts.metrics, make("section", {}, make("h3", {}, "Each request"), parts.lives)),
    parts.output,
    parts.lab,
  );
  return parts;
}

/** The packages that this copy of the site was built without. */
export function missingOf(manifest) {
  return Object.keys(manifest.packages).filter((name) => manifest.packages[name] === null);
}

/** What is said before Python is there: what it takes, or why it can't be started. */
function beforeStart(manifest) {
  const missing = missingOf(manifest);
  if (missing.length > 0) {
    const what = missing.map((name) => NAMES[name]).join(", and without ");
    const whatToDo =
      "So you see runs that were made when it was built: choose one above. To change anything, build the site where " +
      "npm is installed (make docs).";
    return `This copy of the site was built without ${what}. ${whatToDo}`;
  }
  const megabytes = Object.values(manifest.packages.pyodide.files).reduce((sum, size) => sum + size, 0) / 1e6;
  const size = `it loads ${megabytes.toFixed(0)} MB from this site (about a third of that if the server compresses)`;
  return (
    "You see a run that was made when the site was built. To turn the dials and to change the code, start Python " +
    `here: ${size}, and your browser keeps it.`
  );
}
