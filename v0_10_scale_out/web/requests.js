/**
 * The list of requests, in order of arrival: one row each, which writes only what has changed.
 *
 * The list follows the oldest unfinished request until the reader scrolls. Rows out of sight are written later.
 * What this leaves out: requests that the state has forgotten, which are only counted.
 */

import { byId, setAttribute, setText } from "./dom.js";
import { hasEnded } from "./folds.js";
import { Row } from "./row.js";
import { grouped } from "./words.js";

const AT_ONCE = 3; // rows out of sight that are written in a frame

export class RequestsPanel {
  constructor(view) {
    this.view = view;
    this.rows = new Map(); // by request id
    this.list = byId("requests");
    this.follows = true;
    this.current = null;
    this.numToSettle = 0;
    this.waiting = new Set(); // ids of rows out of sight that are not up to date
    this.observer = new IntersectionObserver((entries) => this.seen(entries), {
      root: this.list,
      rootMargin: "60px 0px",
    });
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

  /** Rows have come into sight, or left it. */
  seen(entries) {
    for (const { target, isIntersecting } of entries) {
      const row = this.rows.get(target.dataset.request);
      if (row) {
        row.isInSight = isIntersecting;
        if (isIntersecting && this.waiting.delete(target.dataset.request)) {
          row.render(row.request);
        }
      }
    }
  }

  setFollows(follows) {
    this.follows = follows;
    this.current = null;
    this.numToSettle = follows ? 1 : 0;
    setAttribute(this.followButton, "aria-pressed", follows);
    this.view.onChange("requests");
  }

  lightRowOf(target) {
    const element = target.closest("[data-request]");
    this.view.light(element ? [element.dataset.request] : []);
  }

  /** Returns whether the list has not come to rest. */
  render(state, dirty) {
    if (dirty.all) {
      this.renderAll(state);
    } else if (dirty.requests.size > 0) {
      for (const id of dirty.requests) {
        this.renderOne(state, id);
      }
    } else if (this.numToSettle === 0 && this.waiting.size === 0) {
      return false;
    }
    this.catchUp(state);
    this.renderSummary(state);
    this.choose(state);
    return this.numToSettle > 0 || this.waiting.size > 0;
  }

  /** Bring a few of the rows up to date that wait. */
  catchUp(state) {
    let number = 0;
    for (const id of this.waiting) {
      if (number++ === AT_ONCE) {
        break;
      }
      this.waiting.delete(id);
      const request = state.requests.get(id);
      if (request) {
        this.rows.get(id)?.render(request);
      }
    }
  }

  renderOne(state, id, mayWait = true) {
    const request = state.requests.get(id);
    let row = this.rows.get(id);
    if (!request) {
      this.remove(id);
      return;
    }
    if (!row) {
      row = new Row(request, this.view);
      this.rows.set(id, row);
      this.list.append(row.element);
      this.observer.observe(row.element);
    }
    if (row.render(request, mayWait)) {
      this.waiting.delete(id);
    } else {
      this.waiting.add(id);
    }
  }

  remove(id) {
    const row = this.rows.get(id);
    if (row) {
      this.observer.unobserve(row.element);
      row.element.remove();
      this.rows.delete(id);
    }
  }

  /** After a snapshot or a seek any request may be there or gone: bring the rows in order, too. */
  renderAll(state) {
    for (const [id, row] of this.rows) {
      const request = state.requests.get(id);
      if (request?.label !== row.label || request.colour !== row.colour) {
        this.remove(id);
      }
    }
    let next = this.list.firstElementChild;
    for (const id of state.requests.keys()) {
      this.renderOne(state, id, false);
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
    setText(earlier, `${grouped(state.numForgotten)} earlier ones have ended and are not shown.`);
    byId("requests-empty").hidden = numShown > 0;
    const numUnfinished = numShown - state.numEnded;
    const numEnded = state.numEnded + state.numForgotten;
    setText(
      byId("requests-summary"),
      numShown === 0 ? "" : `${grouped(numUnfinished)} unfinished, ${grouped(numEnded)} ended`,
    );
  }

  /** The oldest unfinished request is the one to keep in sight. */
  choose(state) {
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
    if (current !== this.current) {
      this.current = current;
      this.numToSettle = 4; // the rows above get their heights once they are near
    }
  }

  /** Scroll to it. Asks where things are: to be called after everything has been written. */
  follow() {
    if (this.numToSettle > 0) {
      this.numToSettle -= 1;
      const row = this.rows.get(this.current);
      if (row) {
        this.list.scrollTop = row.element.offsetTop - this.list.offsetTop;
      }
    }
  }

  renderLit() {
    for (const [id, row] of this.rows) {
      row.setLit(this.view.lit.has(id));
    }
  }
}
