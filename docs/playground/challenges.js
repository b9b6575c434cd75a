/**
 * The tasks beside the editor: which there are, what the chosen one asks for, and whether the last run solves it.
 *
 * What this leaves out: the checks. They are in `simulator/challenges.py`, and come with each run's answer.
 */

import { make } from "../visualizer/dom.js";

export class ChallengePanel {
  constructor({ onTake, onSolve }) {
    this.onTake = onTake;
    this.onSolve = onSolve;
    this.verdict = make("div", { class: "verdict", role: "status" });
    this.element = make("section", { class: "challenges", "aria-label": "Challenges" });
  }

  /** Show the tasks of a milestone, of which one may be chosen. */
  show(tasks, current) {
    this.verdict.replaceChildren();
    delete this.verdict.dataset.solved;
    const buttons = tasks.map((task) =>
      make(
        "button",
        {
          type: "button",
          "data-challenge": task.id,
          "aria-pressed": String(task === current),
          onclick: () => this.onTake(task),
        },
        task.title,
      ),
    );
    this.element.replaceChildren(make("h3", {}, "Challenges"));
    if (tasks.length === 0) {
      this.element.append(make("p", {}, "v0.3, v0.6 and v0.7 have challenges."));
      return;
    }
    this.element.append(make("div", { class: "presets" }, ...buttons));
    if (current) {
      const solve = make(
        "button",
        { type: "button", class: "link-button", id: "solution", onclick: () => this.onSolve(current) },
        "Show a solution",
      );
      this.element.append(make("p", { class: "task" }, current.task), this.verdict, solve);
    } else {
      this.element.append(
        make("p", {}, "Each has a setting of its own and a goal. Choose one, change the code, and run it."),
      );
    }
  }

  /** Say whether a run solves the chosen task. */
  judge({ verdict, failure }, isEdited) {
    const isSolved = Boolean(verdict?.is_solved);
    let head = "This is the original: change it.";
    if (isSolved) {
      head = "Solved.";
    } else if (failure) {
      head = "Not solved: the run has failed.";
    } else if (isEdited) {
      head = "Not solved yet.";
    }
    const sentences = (verdict?.sentences ?? []).map((sentence) => make("li", {}, sentence));
    this.verdict.dataset.solved = String(isSolved);
    this.verdict.replaceChildren(make("b", {}, head), make("ul", {}, ...sentences));
  }

  /** Say how the solution works. */
  explain(text) {
    this.verdict.append(make("p", { class: "solution" }, text));
  }
}
