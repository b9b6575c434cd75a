/**
 * What the page asks of the server by HTTP: answers to prompts, another pace, the recording of the run.
 *
 * The key stays in the tab (`sessionStorage`), and goes into headers and into the WebSocket's subprotocol, never into
 * an address. What this leaves out: the answers. The page sees them as events, like everybody's; their bodies are only
 * read so that the server can go on sending, and closed to abort.
 */

const KEY_NAME = "mini-vllm.key";

/** The subprotocols that carry a key: a browser can't set headers on a WebSocket. */
export function protocolsFor(key) {
  if (!key) {
    return ["mini-vllm"];
  }
  const bytes = String.fromCharCode(...new TextEncoder().encode(key));
  const encoded = btoa(bytes).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return ["mini-vllm", `mini-vllm.key.${encoded}`];
}

export class Api {
  constructor() {
    this.root = new URL("../", import.meta.url); // this module is /visualizer/api.js
    this.running = new Set();
  }

  get key() {
    return sessionStorage.getItem(KEY_NAME) ?? "";
  }

  set key(value) {
    sessionStorage.setItem(KEY_NAME, value);
  }

  get eventsUrl() {
    const url = new URL("events", this.root);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    return url;
  }

  request(path, options = {}) {
    const headers = { ...options.headers, ...(this.key ? { Authorization: `Bearer ${this.key}` } : {}) };
    return fetch(new URL(path, this.root), { ...options, headers });
  }

  post(path, body, signal) {
    const headers = { "Content-Type": "application/json" };
    return this.request(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  }

  /** The status of a small request with the same key, or null if nobody answers. */
  async probe() {
    try {
      return (await this.request("v1/models")).status;
    } catch {
      return null;
    }
  }

  /** Ask the engine for another pace: any of `{paused, steps, delay}`. */
  async control(change) {
    const response = await this.post("events/control", change);
    if (!response.ok) {
      throw new Error(await messageOf(response));
    }
  }

  /**
   * Have the engine answer. `onFirst` is called once some of the answer is there.
   * Ends when the whole answer is there, or `cancel` was called.
   */
  async submit(path, body, onFirst = () => {}) {
    const aborter = new AbortController();
    this.running.add(aborter);
    try {
      const response = await this.post(path, { ...body, stream: true }, aborter.signal);
      if (!response.ok) {
        throw new Error(await messageOf(response));
      }
      const reader = response.body.getReader();
      for (let first = true; !(await reader.read()).done; first = false) {
        if (first) {
          onFirst();
        }
      }
    } catch (error) {
      if (!aborter.signal.aborted) {
        throw error;
      }
    } finally {
      this.running.delete(aborter);
    }
  }

  /** Abort everything that this page has asked for. */
  cancel() {
    this.running.forEach((aborter) => aborter.abort());
  }

  /** The recording of the run, as a file's content. */
  async download() {
    const response = await this.request("events/recording");
    if (!response.ok) {
      throw new Error(await messageOf(response));
    }
    return response.blob();
  }
}

/** What a refused request's body says, or at least its status. */
async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with HTTP ${response.status}. Look at its log.`;
  }
}
