/**
 * Where messages come from. The page knows a source only by this interface:
 *
 *   kind            "live" | "recording" | "simulated"
 *   start(to)       begin; `to` is told of everything:
 *                     to.messages(list)   the next messages, in order
 *                     to.state(state)     another state takes the place of the present one (a seek)
 *                     to.status({state, text, detail, needsKey})
 *                                         state is "connecting" | "open" | "closed" | "replay" | "failed"
 *   stop()          end; nothing is told any more
 *   engine          what can be asked of the engine: {submit, control, cancel, running, download} as in `api.js`, or
 *                   null where there is none
 *   player          what can be asked of a recording: {play, pause, seek, ...} as in `recording.js`, or null where
 *                   time is real
 *
 * A simulated run is a recording that was made a moment ago. The page around this one hands it over: the site's playground.
 * What this leaves out: the state. Whoever starts a source folds what it tells.
 */

import { LiveSource } from "./live.js";
import { parseRecording, RecordingSource } from "./recording.js";

/** Nothing yet: the page around this one will hand its own sources over (`window.visualizer.use`). */
const NOTHING_YET = {
  kind: "simulated",
  engine: null,
  player: null,
  start: (to) => to.status({ state: "replay", text: "Simulated", detail: null, needsKey: false }),
  stop: () => {},
};

/** The source that the page's address asks for: a recording if it names one, or the server it came from. */
export async function sourceOf(location) {
  const parameters = new URLSearchParams(location.search);
  if (parameters.has("simulated")) {
    return NOTHING_YET;
  }
  const name = parameters.get("recording");
  return name === null ? new LiveSource() : recordingAt(name, location);
}

async function recordingAt(name, location) {
  const url = new URL(name, location.href);
  if (url.origin !== location.origin) {
    throw new Error("A recording has to come from the same site as this page. Download it, and open it as a file.");
  }
  const response = await fetch(url);
  if (!response.ok) {
    throw new Error(
      `There is no recording at ${url.pathname} (HTTP ${response.status}). Check ?recording= in the address.`,
    );
  }
  return new RecordingSource(parseRecording(await response.text()), url.pathname.split("/").pop());
}

/** The source that plays a file of the reader's. */
export async function sourceOfFile(file) {
  return new RecordingSource(parseRecording(await file.text()), file.name);
}
