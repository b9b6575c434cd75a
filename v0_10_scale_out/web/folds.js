/**
 * How each event changes the state: pure, no DOM.
 *
 * `FOLDS` has a function for each type of event. An event may name a request or a block twice in one step (a copied
 * block is allocated, freed and copied): owning and giving back are the same however often they are said.
 * What this leaves out: snapshots, which replace the state (`state.js`), and what a step adds up to (`steps.js`).
 */

import { labelOf, pickColour } from "./colours.js";
import { addStep } from "./steps.js";

export const MAX_FINISHED = 200;
const MAX_NAMES = 3000;
const ENDED = new Set(["done", "aborted"]);

export function hasEnded(request) {
  return ENDED.has(request.state);
}

/** A request that was not known before: its name, its colour, and what is known from the beginning. */
export function arrive(state, fields) {
  const id = fields.request_id;
  const name = { label: labelOf(state.numArrived), colour: pickColour(id, state.recentColours) };
  const request = {
    id,
    ...name,
    parentId: fields.parent_id,
    state: "waiting",
    forkedFrom: null,
    prompt: fields.prompt,
    numPromptTokens: fields.num_prompt_tokens,
    maxTokens: fields.max_tokens,
    numOutputTokens: 0,
    numComputedTokens: 0,
    numTokens: fields.num_prompt_tokens,
    numCachedTokens: 0,
    numPreemptions: 0,
    numDraftTokens: 0,
    numAcceptedTokens: 0,
    secondsToFirstToken: null,
    finishReason: null,
    text: "",
    blockTable: [],
  };
  state.numArrived += 1;
  state.recentColours = [name.colour, ...state.recentColours].slice(0, 4);
  state.requests.set(id, request);
  state.names.set(id, name);
  if (state.names.size > MAX_NAMES) {
    state.names.delete(state.names.keys().next().value);
  }
  return request;
}

/** A request has ended; of those that have, the oldest beyond the newest ones are forgotten. */
export function end(state, request, how, reason) {
  Object.assign(request, { state: how, finishReason: reason });
  state.numEnded += 1;
  for (const other of state.requests.values()) {
    if (state.numEnded <= MAX_FINISHED) {
      break;
    }
    if (hasEnded(other)) {
      state.requests.delete(other.id);
      state.dirty.requests.add(other.id);
      state.numEnded -= 1;
      state.numForgotten += 1;
    }
  }
}

export function own(state, block, id) {
  const { owners } = state.blocks[block];
  const request = state.requests.get(id);
  if (!owners.includes(id)) {
    state.blocks[block].owners = [...owners, id];
  }
  if (request && !request.blockTable.includes(block)) {
    request.blockTable = [...request.blockTable, block];
  }
  touch(state, id, block);
}

function disown(state, block, id) {
  const request = state.requests.get(id);
  state.blocks[block].owners = state.blocks[block].owners.filter((owner) => owner !== id);
  state.blocks[block].last = id;
  if (request) {
    request.blockTable = request.blockTable.filter((other) => other !== block);
  }
  touch(state, id, block);
}

function touch(state, id, block) {
  state.dirty.requests.add(id);
  if (block !== undefined) {
    state.dirty.blocks.add(block);
  }
}

function setCached(state, block, cached) {
  state.blocks[block].cached = cached;
  state.dirty.blocks.add(block);
}

/** A fold that changes the request that a message names. */
function ofRequest(change) {
  return (state, message) => {
    const request = state.requests.get(message.request_id);
    if (request) {
      change(request, message, state);
      touch(state, request.id);
    }
  };
}

function write(request, message, state) {
  request.state = "decode";
  request.numOutputTokens += message.token_ids.length;
  request.numTokens += message.token_ids.length;
  request.numComputedTokens = request.numTokens - 1; // the newest token is computed by the next step
  request.text += message.text;
  state.totals.tokens += message.token_ids.length;
}

export const FOLDS = new Map(
  Object.entries({
    request_queued: (state, message) => touch(state, arrive(state, message).id),
    request_admitted: ofRequest((request, message, state) => {
      request.state = "prefill";
      request.numComputedTokens = message.num_cached_tokens;
      if (request.numPreemptions === 0) {
        request.numCachedTokens = message.num_cached_tokens;
        state.totals.prompt += request.numPromptTokens;
        state.totals.cached += message.num_cached_tokens;
      }
    }),
    request_forked: ofRequest((request, message, state) => {
      const from = state.requests.get(message.from_request_id);
      request.state = "decode";
      request.forkedFrom = message.from_request_id;
      request.numComputedTokens = request.numPromptTokens;
      request.numCachedTokens = from?.numCachedTokens ?? 0;
    }),
    prefill_chunk: ofRequest((request, message, state) => {
      const numFound = message.num_computed_tokens - message.num_new_tokens - request.numComputedTokens;
      request.state = "prefill";
      request.numComputedTokens = message.num_computed_tokens;
      request.numTokens = message.num_tokens;
      if (request.numPreemptions === 0 && numFound > 0) {
        request.numCachedTokens += numFound;
        state.totals.cached += numFound;
      }
    }),
    first_token: ofRequest((request, message, state) => {
      write(request, message, state);
      request.secondsToFirstToken = message.seconds;
    }),
    decode: ofRequest(write),
    speculative_round: ofRequest((request, message, state) => {
      request.numDraftTokens += message.num_draft_tokens;
      request.numAcceptedTokens += message.num_accepted_tokens;
      state.totals.drafts += message.num_draft_tokens;
      state.totals.accepted += message.num_accepted_tokens;
    }),
    request_preempted: ofRequest((request, message, state) => {
      request.state = "preempted";
      request.numPreemptions += 1;
      request.numComputedTokens = 0;
      state.totals.preemptions += 1;
    }),
    request_finished: ofRequest((request, message, state) => end(state, request, "done", message.reason)),
    request_aborted: ofRequest((request, message, state) => end(state, request, "aborted", null)),
    block_allocated: (state, message) => {
      setCached(state, message.block, false);
      own(state, message.block, message.request_id);
    },
    block_shared: (state, message) => own(state, message.block, message.request_id),
    block_copied: (state, message) => {
      disown(state, message.source, message.request_id);
      own(state, message.target, message.request_id);
    },
    block_cached: (state, message) => setCached(state, message.block, true),
    block_evicted: (state, message) => setCached(state, message.block, false),
    block_freed: (state, message) => disown(state, message.block, message.request_id),
    cache_reset: (state) => state.blocks.forEach((block, number) => block.cached && setCached(state, number, false)),
    pace_changed: (state, message) => {
      state.pace = { paused: message.paused, delay: message.delay };
      state.dirty.pace = true;
    },
    step: (state, message) => {
      state.step = message.number;
      addStep(state, message);
    },
  }),
);
