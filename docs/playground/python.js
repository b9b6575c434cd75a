/**
 * The page's side of the worker: starts it, asks it, and ends it when an answer takes too long.
 *
 * A reader's endless loop can't be interrupted from within. So the worker is ended as a whole, and another one is started,
 * which takes a second or two. The page goes on meanwhile.
 */

export const LIMIT = 5000; // milliseconds for an answer

export class TooLongError extends Error {
  constructor(limit) {
    super(`The run was ended after ${limit / 1000} seconds. Is there an endless loop in the edited code?`);
  }
}

export class Python {
  constructor(manifest, onProgress) {
    this.manifest = manifest;
    this.onProgress = onProgress;
    this.limit = LIMIT;
    this.numStarts = 0;
    this.numAsked = 0;
    this.waiting = new Map(); // by number: who waits for that answer
    this.started = null;
  }

  /** Resolves once Python can be asked; started again after an end. */
  start() {
    this.started ??= new Promise((resolve, reject) => {
      this.numStarts += 1;
      const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
      this.worker = worker;
      const fail = (message) => {
        worker.terminate();
        this.started = null;
        reject(new Error(message));
      };
      worker.addEventListener("error", (event) => fail(event.message || "The worker could not be loaded."));
      worker.addEventListener("message", ({ data }) => {
        if (data.ready) {
          resolve();
        } else if (data.id !== undefined) {
          this.waiting.get(data.id)?.(data);
        } else if (data.error) {
          fail(data.error);
        } else {
          this.onProgress(data.progress);
        }
      });
      worker.postMessage({ do: "start", manifest: this.manifest });
    });
    return this.started;
  }

  /** What Python says to a request; both are plain objects. */
  async ask(request) {
    await this.start();
    const id = this.numAsked++;
    const { worker, limit } = this;
    const data = await new Promise((resolve, reject) => {
      const timer = window.setTimeout(() => {
        worker.terminate();
        this.started = null;
        this.waiting.clear();
        reject(new TooLongError(limit));
      }, limit);
      this.waiting.set(id, (answer) => {
        window.clearTimeout(timer);
        this.waiting.delete(id);
        resolve(answer);
      });
      worker.postMessage({ do: "ask", id, request: JSON.stringify(request) });
    });
    if (data.error !== undefined) {
      throw new Error(data.error);
    }
    return JSON.parse(data.answer);
  }
}
