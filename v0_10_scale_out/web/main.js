/**
 * Puts the page together: a source's messages are folded into the state, and once a frame what has changed is drawn.
 *
 * The address may say: `?recording=` (a file of this site, played instead of a live engine), `&step=` (be there, and
 * wait), `&speed=`, `?embed` (inside of another page: only what is needed there), `?theme=dark` or `light`.
 * What this leaves out: everything else. See `sources.js` for where messages come from, `state.js` for what they mean.
 */

import { Charts } from "./charts.js";
import { Controls, explain } from "./controls.js";
import { Decision } from "./decision.js";
import { byId, notify, setText } from "./dom.js";
import { Header } from "./header.js";
import { LogPanel } from "./log.js";
import { PoolPanel } from "./pool.js";
import { ReplayBar } from "./replay.js";
import { RequestsPanel } from "./requests.js";
import { sourceOf, sourceOfFile } from "./sources.js";
import { createState, fold, takeDirty } from "./state.js";
import { followFrame, startTheme } from "./theme.js";
import { Timeline } from "./timeline.js";
import { View } from "./view.js";

const MAX_TIMES = 600;
const parameters = new URLSearchParams(window.location.search);
const view = new View();
const panels = {
  header: new Header(),
  requests: new RequestsPanel(view),
  pool: new PoolPanel(view),
  timeline: new Timeline(view),
  decision: new Decision(view),
  charts: new Charts(),
  log: new LogPanel(view),
};
const frameTimes = []; // milliseconds that the last frames took to draw
let state = createState();
let source = null;
let controls = null;
let replayBar = null;
let isScheduled = false;
let isLitStale = false;

window.visualizer = {
  frameTimes,
  use,
  get state() {
    return state;
  },
  get source() {
    return source;
  },
};

/** Draw in the next frame; once, however often this is called. */
function schedule() {
  if (!isScheduled) {
    isScheduled = true;
    window.requestAnimationFrame(draw);
  }
}

function draw(now) {
  isScheduled = false;
  const begin = performance.now();
  const dirty = takeDirty(state);
  panels.timeline.render(state, dirty); // the first: a canvas asks for the page's style
  const isMoving = panels.requests.render(state, dirty);
  const isPoolLate = panels.pool.render(state, dirty, now);
  controls?.render(state, dirty);
  if (isLitStale) {
    isLitStale = false;
    panels.requests.renderLit();
    panels.pool.renderLit();
  }
  const later = [
    isMoving,
    isPoolLate,
    panels.header.render(state, dirty, now),
    panels.charts.render(state, dirty, now),
    panels.decision.render(state, dirty, now),
  ];
  panels.requests.follow(); // the last ones, because they ask where things are
  later.push(panels.log.render(state, dirty, now));
  if (later.includes(true)) {
    schedule();
  }
  frameTimes.push(performance.now() - begin);
  if (frameTimes.length > MAX_TIMES) {
    frameTimes.shift();
  }
}

view.onChange = (what) => {
  if (what === "lit") {
    isLitStale = true;
    panels.timeline.stale = true;
  } else if (what === "step") {
    panels.timeline.stale = true;
  } else if (what === "log") {
    panels.log.refilter();
    byId("log").scrollIntoView({ block: "nearest" });
  } else if (what === "scroll") {
    panels.log.draw();
    return;
  }
  schedule();
};

/** Let another source have the page. */
function use(next) {
  source?.stop();
  replayBar?.remove();
  [source, state, controls, replayBar] = [next, createState(), null, null];
  view.choose(null);
  byId("control").hidden = true;
  byId("download").hidden = next.engine === null;
  panels.decision.onGo = next.player ? (number) => next.player.goToStep(number) : null;
  document.documentElement.dataset.source = next.kind;
  setText(
    byId("requests-empty"),
    next.engine ? "No requests yet. Choose a preset above, or send the server prompts." : "No requests yet.",
  );
  if (next.engine) {
    controls = new Controls(next.engine);
  }
  next.start({
    messages: (messages) => {
      messages.forEach((message) => fold(state, message));
      schedule();
    },
    state: (other) => {
      state = other;
      panels.timeline.choose(null);
      schedule();
    },
    status: (status) => {
      panels.header.status(status);
      byId("key-form").hidden = !status.needsKey;
      if (status.state !== "connecting") {
        notify(status.detail);
      }
    },
  });
  if (next.player) {
    replayBar = new ReplayBar(next.player, () => state);
    begin(next.player);
  }
  schedule();
}

/** Play a recording once it is in sight, unless a step was asked for or the reader wants no motion. */
function begin(player) {
  const speed = Number(parameters.get("speed"));
  if (speed > 0) {
    player.setSpeed(speed);
  }
  if (parameters.has("step")) {
    player.goToStep(Number(parameters.get("step")));
  } else if (!window.matchMedia("(prefers-reduced-motion: reduce)").matches) {
    const observer = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) {
        observer.disconnect();
        player.play();
      }
    });
    observer.observe(byId("replay"));
  }
}

async function attempt(promise) {
  try {
    use(await promise);
    return true;
  } catch (error) {
    panels.header.status({ state: "failed", text: "Nothing to show", detail: error.message });
    notify(explain(error));
    return false;
  }
}

async function download() {
  try {
    const url = URL.createObjectURL(await source.engine.download());
    const link = Object.assign(document.createElement("a"), { href: url, download: "mini-vllm-recording.jsonl" });
    link.click();
    window.setTimeout(() => URL.revokeObjectURL(url), 10_000);
  } catch (error) {
    notify(explain(error));
  }
}

document.documentElement.classList.toggle("embed", parameters.has("embed"));
startTheme(byId("theme"), parameters, () => panels.timeline.touch());
if (parameters.has("embed")) {
  followFrame(() => panels.timeline.touch());
}
byId("open-recording").addEventListener("click", () => byId("recording-file").click());
byId("recording-file").addEventListener("change", (event) => {
  const [file] = event.target.files;
  if (file) {
    notify(null);
    attempt(sourceOfFile(file));
  }
});
byId("download").addEventListener("click", download);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  source.useKey?.(byId("api-key").value);
  byId("api-key").value = "";
});
attempt(sourceOf(window.location));
