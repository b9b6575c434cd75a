/**
 * The state of the engine, folded from its messages: pure, no DOM, no clock. It runs under Node as well.
 *
 * `fold(state, message)` changes the state and notes in `state.dirty` what it has touched, so that the page draws only
 * that. `copy(state)` makes an independent state, which is cheap: what is inside of arrays and texts is never changed.
 * What this leaves out: everything that a state of bounded size can't have. It forgets finished requests, steps and
 * log entries beyond the newest ones.
 */

import { arrive, end, FOLDS, hasEnded, own } from "./folds.js";
import { emptyNotes, note } from "./steps.js";

export const MAX_LOG = 2000;
const MAX_DIRTY = 2000;

/** A state that knows nothing yet. */
export function createState() {
  return {
    ready: false, // whether a snapshot has come
    seq: -1,
    time: 0,
    milestone: "",
    model: "",
    settings: {},
    pace: { paused: false, delay: 0 },
    step: -1,
    requests: new Map(), // by id, in order of arrival: the unfinished ones, and the newest of those that have ended
    numArrived: 0,
    numEnded: 0, // still in `requests`
    numForgotten: 0, // ended, and not in `requests` any more
    names: new Map(), // id -> {label, colour}, also of some that are forgotten
    recentColours: [], // of the last arrivals, the newest first
    blocks: [], // {owners: [id, ...], cached: bool, last: the id of its last owner, or null}
    steps: [], // the newest ones, oldest first
    notes: emptyNotes(), // what has happened since the last step ended
    totals: { tokens: 0, drafts: 0, accepted: 0, cached: 0, prompt: 0, preemptions: 0 },
    log: [], // the newest messages, oldest first
    numLogged: 0, // how many there have been
    dirty: cleanDirty(true),
  };
}

function cleanDirty(all) {
  return { all, requests: new Set(), blocks: new Set(), steps: all, log: all, pace: all };
}

/** What has been touched since the last call; it counts as drawn from now on. */
export function takeDirty(state) {
  const { dirty } = state;
  state.dirty = cleanDirty(false);
  return dirty;
}

/** An independent copy of a state; drawing it means drawing everything. */
export function copy(state) {
  const requests = new Map();
  for (const [id, request] of state.requests) {
    requests.set(id, { ...request });
  }
  return {
    ...state,
    pace: { ...state.pace },
    requests,
    names: new Map(state.names),
    recentColours: [...state.recentColours],
    blocks: state.blocks.map((block) => ({ ...block })),
    steps: [...state.steps],
    notes: structuredClone(state.notes),
    totals: { ...state.totals },
    log: [...state.log],
    dirty: cleanDirty(true),
  };
}

/** The label and the colour of a request, whether it is still known or not. */
export function nameOf(state, id) {
  return state.names.get(id) ?? { label: id, colour: 0 };
}

/** Take one message into a state, and return the state. Messages of a type that is not known change nothing. */
export function fold(state, message) {
  state.seq = message.seq;
  state.time = message.time;
  if (message.type === "snapshot") {
    foldSnapshot(state, message);
  } else {
    note(state, message);
    FOLDS.get(message.type)?.(state, message);
  }
  state.log.push(message);
  state.numLogged += 1;
  if (state.log.length > MAX_LOG + MAX_LOG / 4) {
    state.log = state.log.slice(-MAX_LOG);
  }
  state.dirty.log = true;
  if (state.dirty.requests.size > MAX_DIRTY) {
    state.dirty = cleanDirty(true); // nobody has drawn for long: the tab is hidden
  }
  return state;
}

function foldSnapshot(state, message) {
  if (state.ready && message.step < state.step && message.reason === "connected") {
    Object.assign(state, createState(), { seq: message.seq, time: message.time }); // another engine
  }
  const { milestone, model, settings, pace, step } = message;
  Object.assign(state, { ready: true, milestone, model, settings, pace: { ...pace }, step });
  const before = state.blocks;
  const emptyBlock = (_, number) => ({ owners: [], cached: false, last: before[number]?.last ?? null });
  state.blocks = Array.from({ length: settings.num_blocks }, emptyBlock);
  state.notes = emptyNotes();
  const here = new Set(message.requests.map((request) => request.request_id));
  for (const request of [...state.requests.values()]) {
    request.blockTable = [];
    if (!here.has(request.id) && !hasEnded(request)) {
      end(state, request, "done", "unseen");
    }
  }
  for (const fields of message.requests) {
    const request = state.requests.get(fields.request_id) ?? arrive(state, fields);
    Object.assign(request, {
      state: fields.state,
      forkedFrom: fields.forked_from,
      numOutputTokens: fields.num_output_tokens,
      numComputedTokens: fields.num_computed_tokens,
      numTokens: fields.num_tokens,
      numCachedTokens: fields.num_cached_tokens,
      numPreemptions: fields.num_preemptions,
      numDraftTokens: fields.num_draft_tokens,
      numAcceptedTokens: fields.num_accepted_tokens,
      text: fields.text,
    });
    for (const block of fields.block_table) {
      own(state, block, request.id);
    }
  }
  for (const block of message.cached_blocks) {
    state.blocks[block].cached = true;
  }
  state.dirty = cleanDirty(true);
}
