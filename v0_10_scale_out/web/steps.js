/**
 * What a step adds up to: pure, no DOM.
 *
 * The events before a `step` are noted, and kept with it: who was admitted, who computed which part of its prompt, who
 * was preempted for whom. Names and colours are kept too, because the timeline outlives the requests.
 * What this leaves out: the words for it (`words.js`).
 */

export const MAX_STEPS = 2000;

/** Nothing has happened since the last step. */
export function emptyNotes() {
  return {
    admitted: [],
    forked: [],
    chunks: {},
    rounds: {},
    preempted: [],
    ended: [],
    numTokens: {},
    numCopied: 0,
    numEvicted: 0,
    numShared: 0,
  };
}

const NOTES = {
  request_admitted: (notes, message) =>
    notes.admitted.push({ id: message.request_id, cached: message.num_cached_tokens }),
  request_forked: (notes, message) => notes.forked.push({ id: message.request_id, from: message.from_request_id }),
  prefill_chunk: (notes, message) => {
    notes.chunks[message.request_id] = {
      tokens: message.num_new_tokens,
      done: message.num_computed_tokens,
      total: message.num_tokens,
    };
  },
  speculative_round: (notes, message) => {
    notes.rounds[message.request_id] = { drafts: message.num_draft_tokens, accepted: message.num_accepted_tokens };
  },
  request_preempted: (notes, message) =>
    notes.preempted.push({
      id: message.request_id,
      forId: message.for_request_id,
      blocks: message.num_blocks,
      tokens: message.num_tokens,
    }),
  request_finished: (notes, message) => notes.ended.push({ id: message.request_id, reason: message.reason }),
  request_aborted: (notes, message) => notes.ended.push({ id: message.request_id, reason: "aborted" }),
  first_token: (notes, message) => (notes.numTokens[message.request_id] = message.token_ids.length),
  decode: (notes, message) => (notes.numTokens[message.request_id] = message.token_ids.length),
  block_copied: (notes) => (notes.numCopied += 1),
  block_evicted: (notes) => (notes.numEvicted += 1),
  block_shared: (notes) => (notes.numShared += 1),
};

/** Note what an event says, until its step has ended. */
export function note(state, message) {
  NOTES[message.type]?.(state.notes, message);
}

/** A step has ended: keep what is known of it. */
export function addStep(state, message) {
  const { notes } = state;
  const called = (entry) => ({ ...entry, ...(state.names.get(entry.id) ?? { label: entry.id, colour: 0 }) });
  const scheduled = message.scheduled.map((part) =>
    called({
      id: part.request_id,
      tokens: part.num_tokens,
      drafts: part.num_draft_tokens,
      isDecode: part.is_decode,
      isAgain: (state.requests.get(part.request_id)?.numPreemptions ?? 0) > 0,
      chunk: notes.chunks[part.request_id] ?? null,
      round: notes.rounds[part.request_id] ?? null,
    }),
  );
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const { schedule_seconds: schedule, run_seconds: run, update_seconds: update, output_seconds: output } = message;
  state.steps.push({
    number: message.number,
    time: message.time,
    budget: message.token_budget,
    scheduled,
    numScheduled: sum(scheduled.map((part) => part.tokens)),
    numWritten: sum(Object.values(notes.numTokens)),
    numDrafts: sum(Object.values(notes.rounds).map((round) => round.drafts)),
    numAccepted: sum(Object.values(notes.rounds).map((round) => round.accepted)),
    admitted: notes.admitted.map(called),
    forked: notes.forked.map(called),
    preempted: notes.preempted.map((entry) => ({ ...called(entry), by: called({ id: entry.forId }) })),
    ended: notes.ended.map(called),
    refused: message.refused === null ? null : called({ id: message.refused, reason: message.refused_reason }),
    numCopied: notes.numCopied,
    numEvicted: notes.numEvicted,
    numShared: notes.numShared,
    numRunning: message.num_running,
    numWaiting: message.num_waiting,
    numFree: message.num_free_blocks,
    numBlocks: state.blocks.length,
    seconds: { schedule, run, update, output, all: schedule + run + update + output },
  });
  state.notes = emptyNotes();
  if (state.steps.length > MAX_STEPS + MAX_STEPS / 4) {
    state.steps = state.steps.slice(-MAX_STEPS);
  }
  state.dirty.steps = true;
}

/** Where the step of a number is in `steps`, or -1: they are in order, though a number may be missing. */
export function findStep(steps, number) {
  let [low, high] = [0, steps.length - 1];
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (steps[middle].number === number) {
      return middle;
    }
    [low, high] = steps[middle].number < number ? [middle + 1, high] : [low, middle - 1];
  }
  return -1;
}
