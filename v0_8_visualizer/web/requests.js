/**
 * The list of requests, in order of arrival: one row each, which writes only what has changed.
 *
 * The list follows the oldest unfinished request until the reader scrolls. What this leaves out: requests that the state
 * has forgotten, which are only counted; and, in a row that is not opened, all but the part of the text that fits.
 */

import { byId, setAttribute, setText } from "./dom.js";
import { hasEnded } from "./folds.js";
import { Row } from "./row.js";
import { plural } from "./words.js";

export class RequestsPanel {
  constructor(view) {
    this.view = view;
    this.rows = new Map(); // by request id
    this.list = byId("requests");
    this.follows = true;
    this.current = null;
    this.followButton = byId("follow");
    this.followButton.addEventListener("click", () => this.setFollows(!this.follows));
    for (const type of ["wheel", "touchmove"]) {
      this.list.addEventListener(type, () => this.setFollows(false), { passive: true });
    }
    this.list.addEventListener("pointerover", (event) => this.lightRowOf(event.target));
    this.list.addEventListener("pointerleave", () => view.light([]));
    this.list.addEventListener("focusin", (event) => this.lightRowOf(event.target));
    this.list.addEventListener("focusout", () => view.light([]));
  }

  setFollows(follows) {
    this.follows = follows;
    this.current = null;
    setAttribute(this.followButton, "aria-pressed", follows);
  }

  lightRowOf(target) {
    const element = target.closest("[data-request]");
    this.view.light(element ? [element.dataset.request] : []);
  }

  render(state, dirty) {
    if (dirty.all) {
      this.renderAll(state);
    } else if (dirty.requests.size > 0) {
      for (const id of dirty.requests) {
        this.renderOne(state, id);
      }
    } else {
      return;
    }
    this.renderSummary(state);
    this.follow(state);
  }

  renderOne(state, id) {
    const request = state.requests.get(id);
    let row = this.rows.get(id);
    if (!request) {
      row?.element.remove();
      this.rows.delete(id);
      return;
    }
    if (!row) {
      row = new Row(request, this.view);
      this.rows.set(id, row);
      this.list.append(row.element);
    }
    row.render(request);
  }

  /** After a snapshot or a seek any request may be there or gone: bring the rows in order, too. */
  renderAll(state) {
    for (const [id, row] of this.rows) {
      const request = state.requests.get(id);
      if (request?.label !== row.label || request.colour !== row.colour) {
        row.element.remove();
        this.rows.delete(id);
      }
    }
    let next = this.list.firstElementChild;
    for (const id of state.requests.keys()) {
      this.renderOne(state, id);
      const { element } = this.rows.get(id);
      if (element === next) {
        next = next.nextElementSibling;
      } else {
        this.list.insertBefore(element, next);
      }
    }
    this.current = null;
  }

  renderSummary(state) {
    const numShown = state.requests.size;
    const earlier = byId("requests-earlier");
    earlier.hidden = state.numForgotten === 0;
    setText(earlier, `${state.numForgotten.toLocaleString("en")} earlier ones have ended and are not shown.`);
    byId("requests-empty").hidden = numShown > 0;
    const numUnfinished = numShown - state.numEnded;
    setText(
      byId("requests-summary"),
      numShown === 0 ? "" : `${plural(numUnfinished, "unfinished one")}, ${state.numEnded + state.numForgotten} ended`,
    );
  }

  /** Keep the oldest unfinished request in sight. */
  follow(state) {
    if (!this.follows) {
      return;
    }
    let current = null;
    for (const request of state.requests.values()) {
      if (!hasEnded(request)) {
        current = request.id;
        break;
      }
    }
    if (current !== null && current !== this.current) {
      this.current = current;
      this.list.scrollTop = this.rows.get(current).element.offsetTop - this.list.offsetTop;
    }
  }

  renderLit() {
    for (const [id, row] of this.rows) {
      row.setLit(this.view.lit.has(id));
    }
  }
}
