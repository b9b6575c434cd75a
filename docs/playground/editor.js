/**
 * The editor: one function at a time, in CodeMirror, with the lines numbered as in the file.
 *
 * Whatever differs from the original is an edit. The lines that failed are marked. What this leaves out: whole files. The
 * functions are what the lessons are about, and the link beside them leads to the file.
 */

import { make, setText } from "../visualizer/dom.js";

const SCRIPTS = [
  "lib/codemirror.js",
  "mode/python/python.js",
  "addon/edit/matchbrackets.js",
  "addon/selection/active-line.js",
];
const LESSONS = {
  v0_3_scheduler: [
    "Scheduler.schedule",
    "Scheduler._preempt_newest",
    "Scheduler.add",
    "Scheduler.update",
    "BlockManager.allocate",
    "BlockManager.append",
    "BlockManager.free",
  ],
  v0_6_prefix_cache: [
    "Scheduler.schedule",
    "Scheduler._catch_up",
    "BlockManager.find_prefix",
    "BlockManager.allocate",
    "BlockManager.publish",
    "BlockManager._take",
    "BlockManager._release",
    "BlockManager.free",
  ],
  v0_7_speculative: [
    "Scheduler.schedule",
    "Scheduler._num_drafts",
    "Scheduler._is_disabled",
    "Scheduler.update",
    "BlockManager.shrink",
  ],
  v0_8_visualizer: ["Scheduler.schedule", "Scheduler._preempt_newest", "Scheduler._num_drafts", "BlockManager._take"],
};

/** Load CodeMirror's scripts and its style sheet, in order, from this site. */
async function loadCodeMirror() {
  const folder = new URL("vendor/codemirror/", import.meta.url);
  document.head.append(make("link", { rel: "stylesheet", href: new URL("lib/codemirror.css", folder).href }));
  for (const name of SCRIPTS) {
    await new Promise((resolve, reject) => {
      const script = make("script", { src: new URL(name, folder).href });
      script.addEventListener("load", resolve);
      script.addEventListener("error", () => reject(new Error(`The editor's ${name} could not be loaded.`)));
      document.head.append(script);
    });
  }
}

export class Editor {
  constructor({ onRun, onChange, onReset, onDiff }) {
    this.onChange = onChange;
    this.onDiff = onDiff;
    this.functions = [];
    this.edits = {};
    this.current = null;
    this.marked = [];
    this.codeMirror = null;
    this.select = make("select", { id: "function", "aria-label": "Function" });
    this.select.addEventListener("change", () => this.open(this.select.value));
    this.place = make("p", { class: "place" });
    this.host = make("div", { class: "code" });
    this.notice = make("p", { class: "notice", hidden: true }); // the page's, where the reader is who has pressed Run
    this.diff = make("pre", { class: "diff", hidden: true, tabindex: 0, "aria-label": "Difference from the original" });
    this.diffButton = make(
      "button",
      { type: "button", "aria-pressed": "false", onclick: () => this.toggleDiff() },
      "Diff",
    );
    this.resetButton = make("button", { type: "button", onclick: () => this.reset() }, "Reset");
    this.resetAllButton = make("button", { type: "button", onclick: onReset }, "Reset all");
    this.element = make(
      "section",
      { class: "editor", "aria-label": "Change the code" },
      make(
        "div",
        { class: "bar" },
        this.select,
        make("button", { type: "button", class: "md-button md-button--primary", id: "run", onclick: onRun }, "Run"),
        this.diffButton,
        this.resetButton,
        this.resetAllButton,
      ),
      this.notice,
      this.place,
      this.host,
      make("p", { class: "place" }, "Ctrl+Enter runs it. Esc leaves the editor."),
      this.diff,
    );
    this.onRun = onRun;
  }

  async load() {
    await loadCodeMirror();
    this.codeMirror = window.CodeMirror(this.host, {
      mode: "python",
      lineNumbers: true,
      indentUnit: 4,
      matchBrackets: true,
      styleActiveLine: true,
      viewportMargin: Infinity,
      screenReaderLabel: "Source of the function",
      extraKeys: {
        "Ctrl-Enter": () => this.onRun(),
        "Cmd-Enter": () => this.onRun(),
        Tab: (editor) => editor.execCommand("indentMore"),
        "Shift-Tab": (editor) => editor.execCommand("indentLess"),
        Esc: () => this.select.focus(), // a way out for the keyboard
      },
    });
    this.codeMirror.on("change", () => this.changed());
  }

  /** Let the functions of a milestone be edited. */
  use(milestone, functions, edits) {
    this.functions = functions;
    this.edits = edits;
    const lesson = LESSONS[milestone] ?? [];
    const rank = ({ name }) => (lesson.includes(name) ? lesson.indexOf(name) : Infinity);
    const option = ({ edit, file, name }) => make("option", { value: edit }, `${name}  (${file})`);
    const first = functions.filter((each) => lesson.includes(each.name)).sort((a, b) => rank(a) - rank(b));
    const files = [...new Set(functions.map((each) => each.file))];
    this.select.replaceChildren(
      make("optgroup", { label: "What the lesson is about" }, ...first.map(option)),
      ...files.map((file) => {
        const others = functions.filter((each) => each.file === file && !lesson.includes(each.name));
        return make("optgroup", { label: file }, ...others.map(option));
      }),
    );
    const edited = Object.keys(edits).find((edit) => functions.some((each) => each.edit === edit));
    this.open(edited ?? first[0]?.edit ?? functions[0].edit);
  }

  open(edit) {
    const found = this.functions.find((each) => each.edit === edit);
    if (!found) {
      return;
    }
    this.current = null; // what comes now is no change of the reader's
    this.select.value = edit;
    this.codeMirror.setOption("firstLineNumber", found.first);
    this.codeMirror.setValue(this.edits[edit] ?? found.text);
    this.codeMirror.clearHistory();
    this.current = found;
    this.showState();
  }

  changed() {
    if (this.current) {
      const text = this.codeMirror.getValue();
      this.setEdit(this.current.edit, text);
      this.unmark();
      this.showState();
    }
  }

  setEdit(edit, text) {
    const { text: original } = this.functions.find((each) => each.edit === edit);
    const edits = { ...this.edits };
    if (text.trimEnd() === original.trimEnd()) {
      delete edits[edit];
    } else {
      edits[edit] = text;
    }
    this.edits = edits;
    this.onChange(edits);
  }

  showState() {
    const isEdited = (edit) => Object.hasOwn(this.edits, edit);
    for (const option of this.select.querySelectorAll("option")) {
      const text = option.textContent.replace(/^● /, "");
      setText(option, isEdited(option.value) ? `● ${text}` : text);
    }
    const { edit, file, first } = this.current;
    const others = Object.keys(this.edits).length - isEdited(edit);
    const more = others ? ` ${others} other function${others > 1 ? "s are" : " is"} edited, too.` : "";
    setText(this.place, `${file}, from line ${first}. ${isEdited(edit) ? "Edited." : "The original."}${more}`);
    this.resetButton.disabled = !isEdited(edit);
    this.resetAllButton.disabled = Object.keys(this.edits).length === 0;
  }

  reset() {
    const { edit, text } = this.current;
    this.setEdit(edit, text);
    this.open(edit);
    this.unmark();
    this.onRun();
  }

  toggleDiff() {
    this.diff.hidden = !this.diff.hidden;
    this.diffButton.setAttribute("aria-pressed", String(!this.diff.hidden));
    if (!this.diff.hidden) {
      this.onDiff();
    }
  }

  /** Show how the edits differ: lines of `diff -u`, by edit. */
  showDiffs(diffs) {
    const lines = Object.entries(diffs).flatMap(([edit, found]) => [`# ${edit.replace(":", ": ")}`, ...found]);
    const kinds = { "+": "added", "-": "removed", "@": "range", "#": "name" };
    this.diff.replaceChildren(
      ...(lines.length ? lines : ["Nothing is changed."]).map((line) =>
        make("span", { class: kinds[line[0]] ?? null }, `${line}\n`),
      ),
    );
  }

  /** Mark a line of a function, from 1. */
  mark(edit, line) {
    if (edit !== this.current?.edit) {
      this.open(edit);
    }
    this.unmark();
    this.marked = [this.codeMirror.addLineClass(line - 1, "wrap", "failed")];
    this.codeMirror.scrollIntoView({ line: line - 1, ch: 0 }, 60);
  }

  unmark() {
    this.marked.forEach((line) => this.codeMirror.removeLineClass(line, "wrap", "failed"));
    this.marked = [];
  }
}
