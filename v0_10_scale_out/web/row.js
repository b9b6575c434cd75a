/**
 * One request's row: its label, its state with a bar, its prompt and its text, its figures.
 *
 * A closed row shows the end of a text that grows, and the beginning of one that is finished; opened, it shows all.
 * What this leaves out: markup. Prompts and texts are text nodes, whatever they contain.
 */

import { make, setAttribute, setText } from "./dom.js";
import { hasEnded } from "./folds.js";
import { ending } from "./words.js";

const CLOSED_LENGTH = 320; // characters: more than fit into a closed row
const NAMES = {
  waiting: "Waiting",
  prefill: "Prefill",
  decode: "Decode",
  preempted: "Preempted",
  done: "Done",
  aborted: "Aborted",
};
let numRows = 0;

/** The part of a text that a closed row needs; never half of a character. */
export function excerpt(text, atEnd) {
  if (text.length <= CLOSED_LENGTH) {
    return text;
  }
  if (atEnd) {
    const start = text.length - CLOSED_LENGTH;
    const isHalf = text.charCodeAt(start) >= 0xdc00 && text.charCodeAt(start) <= 0xdfff;
    return `…${text.slice(isHalf ? start + 1 : start)}`;
  }
  const isHalf = text.charCodeAt(CLOSED_LENGTH - 1) >= 0xd800 && text.charCodeAt(CLOSED_LENGTH - 1) <= 0xdbff;
  return `${text.slice(0, isHalf ? CLOSED_LENGTH - 1 : CLOSED_LENGTH)}…`;
}

export class Row {
  constructor(request, view) {
    this.label = request.label;
    this.colour = request.colour;
    this.request = request;
    this.isOpen = false;
    const id = `row-${numRows++}`;
    this.button = make(
      "button",
      {
        type: "button",
        class: "chip",
        "data-colour": request.colour,
        title: request.id,
        "aria-expanded": "false",
        "aria-controls": id,
        "aria-label": `Request ${request.label}: show its whole text`,
      },
      request.label,
    );
    this.state = make("span", { class: "state" });
    this.count = make("span", { class: "count" });
    this.fill = make("i");
    this.bar = make("div", { class: "bar", role: "progressbar", "aria-label": `Progress of request ${request.label}` });
    this.bar.append(this.fill);
    this.prompt = make("p", { class: "prompt" });
    this.textIn = make("span");
    this.text = make("p", { class: "text" }, this.textIn);
    this.figures = make("p", { class: "numbers" });
    this.more = make("p", { class: "more", hidden: true });
    this.logButton = make(
      "button",
      { type: "button", class: "link", onclick: () => view.filterLog(this.request.id) },
      "Show only its events",
    );
    this.element = make(
      "li",
      { class: "row", "data-request": request.id, "data-colour": request.colour },
      this.button,
      make("div", { class: "status" }, this.state, this.count, this.bar),
      make("div", { class: "texts", id }, this.prompt, this.text, this.more),
      this.figures,
    );
    this.element.addEventListener("click", (event) => {
      if (!event.target.closest(".link") && String(window.getSelection()) === "") {
        this.toggle();
      }
    });
    this.last = {};
    this.isInSight = true;
  }

  toggle() {
    this.isOpen = !this.isOpen;
    this.element.classList.toggle("open", this.isOpen);
    setAttribute(this.button, "aria-expanded", this.isOpen);
    this.more.hidden = !this.isOpen;
    this.last = {};
    this.render(this.request);
  }

  setLit(lit) {
    this.element.classList.toggle("lit", lit);
  }

  /** Write what has changed; returns false where nobody would see it, and it can wait. */
  render(request, mayWait = false) {
    this.request = request;
    if (mayWait && !this.isInSight && this.last.state === request.state) {
      return false;
    }
    this.last.state = request.state;
    setAttribute(this.element, "data-state", request.state);
    setText(this.state, NAMES[request.state] ?? request.state);
    this.renderProgress(request);
    this.renderTexts(request);
    setText(this.figures, figuresOf(request));
    if (this.isOpen) {
      this.more.replaceChildren(`${request.id}. ${storyOf(request)} `, this.logButton);
    }
    return true;
  }

  renderProgress(request) {
    const isWriting = request.state === "decode" || hasEnded(request);
    const [done, total] = isWriting
      ? [request.numOutputTokens, request.maxTokens]
      : [request.numComputedTokens, request.numTokens];
    setText(this.count, total === null ? `${done}` : `${done} / ${total}`);
    const share = total ? Math.min(done / total, 1) : 0;
    if (share !== this.last.share) {
      this.last.share = share;
      this.fill.style.transform = `scaleX(${share.toFixed(4)})`;
      setAttribute(this.bar, "aria-valuenow", Math.round(share * 100));
    }
  }

  renderTexts(request) {
    if (this.last.prompt !== request.prompt || this.last.isOpen !== this.isOpen) {
      const prompt = request.prompt ?? `A prompt of ${request.numPromptTokens} tokens`;
      this.prompt.textContent = this.isOpen ? prompt : excerpt(prompt.replaceAll(/[\r\n]+/g, " ↵ "), false);
    }
    const ended = hasEnded(request);
    if (this.last.text !== request.text || this.last.ended !== ended) {
      this.textIn.textContent = this.isOpen ? request.text : excerpt(request.text, !ended);
    }
    Object.assign(this.last, { prompt: request.prompt, text: request.text, isOpen: this.isOpen, ended });
  }
}

/** The figures of a row; those that are nothing are left out. */
function figuresOf(request) {
  const share = request.numDraftTokens ? Math.round((100 * request.numAcceptedTokens) / request.numDraftTokens) : 0;
  return [
    `${request.numPromptTokens} in`,
    `${request.numOutputTokens} out`,
    request.numCachedTokens > 0 ? `${request.numCachedTokens} cached` : "",
    request.numPreemptions > 0 ? `${request.numPreemptions}× preempted` : "",
    request.numDraftTokens > 0 ? `${share}% of drafts right` : "",
  ]
    .filter((part) => part !== "")
    .join("  ·  ");
}

function storyOf(request) {
  const first =
    request.secondsToFirstToken === null ? "" : `First token after ${request.secondsToFirstToken.toFixed(2)} s. `;
  const fork =
    request.forkedFrom && request.state === "waiting" ? `It waits for the prompt of ${request.forkedFrom}. ` : "";
  const blocks = request.blockTable.length > 0 ? `Blocks: ${request.blockTable.join(", ")}. ` : "";
  const end = hasEnded(request) ? `It ${ending(request.state === "aborted" ? "aborted" : request.finishReason)}.` : "";
  return `${first}${fork}${blocks}${end}`;
}
