/**
 * What the reader looks at: the requests that are highlighted, the step that is chosen, the request the log is about.
 *
 * Panels change it and are told of changes, so that a request's row, its blocks and its bars light up together.
 * What this leaves out: the engine's state.
 */

export class View {
  constructor() {
    this.lit = new Set(); // ids of requests
    this.step = null; // the number of a step, or null: the newest
    this.logRequest = null; // an id, or null: all
    this.onChange = () => {};
  }

  /** Highlight these requests, and no others. */
  light(ids) {
    const same = ids.length === this.lit.size && ids.every((id) => this.lit.has(id));
    if (!same) {
      this.lit = new Set(ids);
      this.onChange("lit");
    }
  }

  /** Choose a step by its number, or follow the newest (null). */
  choose(step) {
    if (step !== this.step) {
      this.step = step;
      this.onChange("step");
    }
  }

  /** Let the log be about one request, or about all (null). */
  filterLog(id) {
    if (id !== this.logRequest) {
      this.logRequest = id;
      this.onChange("log");
    }
  }
}
