/**
 * A step's decision and an event in words: pure, no DOM.
 *
 * A sentence is a list of parts: texts, and requests (`{id, label, colour}`), which the page shows as chips.
 * What this leaves out: HTML. Whatever comes from a model or a prompt stays a text.
 */

const REFUSALS = {
  max_num_seqs: "as many requests run as may run at once",
  blocks: "its tokens need more blocks than are free",
  token_budget: "the running requests use the whole budget",
  preemption: "a request has just lost its blocks, so there are none for others",
};

const format = new Intl.NumberFormat("en");

/** A number as people write it: 1,234. */
export function grouped(number) {
  return format.format(number);
}

export function plural(number, noun) {
  return `${grouped(number)} ${noun}${number === 1 ? "" : "s"}`;
}

export function milliseconds(seconds) {
  const value = seconds * 1000;
  return `${value >= 100 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toFixed(2)} ms`;
}

/** Why the request at the head of the queue was not admitted. */
export function refusal(reason) {
  return REFUSALS[reason] ?? String(reason).replaceAll("_", " ");
}

function list(requests) {
  return requests.flatMap((request, i) => {
    const before = i === 0 ? [] : [i === requests.length - 1 ? " and " : ", "];
    return [...before, request];
  });
}

/** The sentences that say what a step has decided and done. */
export function decide(step) {
  const sentences = [];
  const parts = step.scheduled;
  sentences.push([`It used ${grouped(step.numScheduled)} of ${plural(step.budget, "token")} in its budget.`]);
  for (const entry of step.preempted) {
    const why = entry.id === entry.by.id ? ["because no block was free for it"] : ["to make room for ", entry.by];
    const [blocks, tokens] = [plural(entry.blocks, "block"), plural(entry.tokens, "token")];
    const lost = `It released ${blocks}; ${tokens} will be computed again.`;
    sentences.push([entry, " was preempted ", ...why, `. ${lost}`]);
  }
  for (const part of parts.filter((other) => !other.isDecode)) {
    const admitted = step.admitted.find((entry) => entry.id === part.id);
    const found = admitted?.cached ? `: ${plural(admitted.cached, "token")} came from the prefix cache` : "";
    const done =
      part.chunk && part.chunk.done < part.chunk.total ? ` (${part.chunk.done} of ${part.chunk.total} are done)` : "";
    const what = part.isAgain ? "that it had lost" : "of its prompt";
    const begin = admitted ? ` was admitted${found}. It computed ` : " computed ";
    sentences.push([part, `${begin}${plural(part.tokens, "token")} ${what}${done}.`]);
  }
  const plain = parts.filter((part) => part.isDecode && !part.drafts);
  if (plain.length > 0) {
    sentences.push([...list(plain), plain.length === 1 ? " decoded one token." : " decoded one token each."]);
  }
  for (const part of parts.filter((other) => other.isDecode && other.drafts)) {
    const right = part.round
      ? `: ${part.round.accepted} of them ${part.round.accepted === 1 ? "was" : "were"} right`
      : "";
    sentences.push([part, ` decoded, and checked ${plural(part.drafts, "draft")}${right}.`]);
  }
  for (const entry of step.forked) {
    sentences.push([entry, " began with the blocks of the choice that computed their common prompt."]);
  }
  if (step.refused) {
    sentences.push([step.refused, ` had to wait: ${refusal(step.refused.reason)}.`]);
  }
  for (const entry of step.ended) {
    sentences.push([entry, ` ${ending(entry.reason)}.`]);
  }
  if (step.numCopied || step.numEvicted) {
    const copied = step.numCopied ? [`${plural(step.numCopied, "block")} copied before writing`] : [];
    const evicted = step.numEvicted ? [`${plural(step.numEvicted, "cached block")} evicted`] : [];
    sentences.push([`Pool: ${[...copied, ...evicted].join(", ")}.`]);
  }
  return sentences;
}

/** How a request has ended. */
export function ending(reason) {
  const endings = {
    stop: "finished: the model ended its answer",
    length: "finished: it reached its most tokens",
    aborted: "was aborted: its caller left, or the model failed on it",
    unseen: "ended while this page was not connected",
  };
  return endings[reason] ?? `finished: ${reason}`;
}

/** An event as one sentence; `who` names a request by its id. */
export function describe(message, who) {
  const request = () => who(message.request_id);
  const speak = {
    snapshot: () => [`The whole state (${message.reason}): ${plural(message.requests.length, "unfinished request")}.`],
    request_queued: () => [request(), ` waits, with ${plural(message.num_prompt_tokens, "prompt token")}.`],
    request_admitted: () => [
      request(),
      ` was admitted; ${plural(message.num_cached_tokens, "token")} found in the cache.`,
    ],
    request_forked: () => [request(), " runs with the blocks of ", who(message.from_request_id), "."],
    prefill_chunk: () => [
      request(),
      ` computed ${plural(message.num_new_tokens, "token")}: ${message.num_computed_tokens} of ${message.num_tokens}.`,
    ],
    first_token: () => [
      request(),
      ` wrote its first token after ${message.seconds.toFixed(2)} s: `,
      quote(message.text),
    ],
    decode: () => [request(), ` wrote ${plural(message.token_ids.length, "token")}: `, quote(message.text)],
    speculative_round: () => [
      request(),
      ` had ${plural(message.num_draft_tokens, "draft")}: ${message.num_accepted_tokens} right, `,
      `${message.num_rolled_back} taken back.`,
    ],
    request_preempted: () => [
      request(),
      " was preempted for ",
      who(message.for_request_id),
      `: ${plural(message.num_blocks, "block")} released.`,
    ],
    request_finished: () => [request(), ` ${ending(message.reason)}.`],
    request_aborted: () => [request(), ` ${ending("aborted")}.`],
    block_allocated: () => [`Block ${message.block} is now owned by `, request(), "."],
    block_shared: () => [`Block ${message.block} is also owned by `, request(), `: ${message.ref_count} owners.`],
    block_copied: () => [`Block ${message.source} was copied into ${message.target} for `, request(), " to write."],
    block_cached: () => [`Block ${message.block} is full: the prefix cache can find it.`],
    block_evicted: () => [`Block ${message.block} left the prefix cache.`],
    block_freed: () => [request(), ` gave block ${message.block} back: ${plural(message.ref_count, "owner")} left.`],
    cache_reset: () => ["The prefix cache was reset: nothing computed so far can be found."],
    step: () => [
      `Step ${message.number} ended: `,
      `${plural(message.num_running, "request")} running, ${message.num_waiting} waiting.`,
    ],
    pace_changed: () => [pace(message)],
  };
  return speak[message.type]?.() ?? [message.type.replaceAll("_", " ")];
}

function quote(text) {
  return text === "" ? "(a character is incomplete)" : JSON.stringify(text);
}

/** How the engine steps. */
export function pace({ paused, delay }) {
  if (paused) {
    return "The engine is paused.";
  }
  return delay > 0 ? `The engine waits ${delay} s after each step.` : "The engine runs at full speed.";
}
