/**
 * The source of a live page: a WebSocket that comes back by itself.
 *
 * A browser can't see why a WebSocket was refused. So after a refusal a plain request is sent with the same key: if
 * that one is answered with 401, the key is missing or wrong, and the page asks for it.
 * What this leaves out: repair. After a gap in the numbers it connects again, and the server's snapshot mends all.
 */

import { Api, protocolsFor } from "./api.js";

const DELAYS = [0.5, 1, 2, 4, 8]; // seconds until the next try
const NOBODY = "No engine answers here. Start one with python -m v0_8_visualizer, or open a recording.";
const REASONS = {
  1011: "The engine has stopped after an error. Look at the server's log, and restart it.",
  1012: "The server is shutting down. Waiting for it to come back.",
  1013: "Too many pages watch this server. Close one of them.",
};

export class LiveSource {
  constructor() {
    this.kind = "live";
    this.player = null;
    this.engine = new Api();
    this.to = null;
    this.socket = null;
    this.numFailures = 0;
    this.timer = 0;
    this.lastSeq = null;
    this.wasEverOpen = false;
    this.wake = () => !document.hidden && !this.socket && this.retry();
  }

  start(to) {
    this.to = to;
    window.addEventListener("online", this.wake);
    document.addEventListener("visibilitychange", this.wake);
    this.connect();
  }

  stop() {
    this.to = null;
    window.removeEventListener("online", this.wake);
    document.removeEventListener("visibilitychange", this.wake);
    window.clearTimeout(this.timer);
    this.socket?.close();
    this.socket = null;
  }

  /** Connect with another key, at once. */
  useKey(key) {
    this.engine.key = key;
    this.retry();
  }

  retry() {
    window.clearTimeout(this.timer);
    this.numFailures = 0;
    this.connect();
  }

  connect() {
    this.socket?.close();
    this.status("connecting", this.numFailures === 0 ? "Connecting" : "Connecting again");
    const socket = new WebSocket(this.engine.eventsUrl, protocolsFor(this.engine.key));
    this.socket = socket;
    this.lastSeq = null;
    let wasOpen = false;
    socket.addEventListener("open", () => {
      wasOpen = this.wasEverOpen = true;
      this.numFailures = 0;
      this.status("open", "Live");
    });
    socket.addEventListener("message", (event) => socket === this.socket && this.receive(event.data));
    socket.addEventListener("close", (event) => socket === this.socket && this.closed(event.code, wasOpen));
  }

  receive(data) {
    const message = JSON.parse(data);
    if (message.type !== "snapshot" && message.seq !== this.lastSeq + 1) {
      this.connect(); // something is missing: only a snapshot helps
      return;
    }
    this.lastSeq = message.seq;
    this.to?.messages([message]);
  }

  async closed(code, wasOpen) {
    this.socket = null;
    const again = DELAYS[Math.min(this.numFailures, DELAYS.length - 1)] * (0.8 + 0.4 * Math.random());
    this.numFailures += 1;
    this.timer = window.setTimeout(() => this.connect(), again * 1000);
    const lost = this.wasEverOpen ? "The connection was lost. Trying again." : NOBODY;
    const text = REASONS[code] ?? lost;
    this.status("closed", "Not connected", text);
    if (!wasOpen) {
      await this.explainRefusal();
    }
  }

  async explainRefusal() {
    const status = await this.engine.probe();
    if (status === 401) {
      window.clearTimeout(this.timer); // without another key the next try would fail as well
      this.status("failed", "Key needed", null, true);
    } else if (status !== null && this.socket === null) {
      const text =
        "The server answers, but shows no events. Close other pages that watch it, or open the address it has printed.";
      this.status("closed", "Refused", text);
    }
  }

  status(state, text, detail = null, needsKey = false) {
    this.to?.status({ state, text, detail, needsKey });
  }
}
