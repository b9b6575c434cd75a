/**
 * Prompts that provoke something: pure, no DOM.
 *
 * Their lengths follow from the engine's settings. A common English word is about one token, so words are counted.
 * What this leaves out: exactness. The presets need to be long enough, and no more.
 */

const SENTENCES = [
  "The old man walked down to the river and looked at the water for a long time.",
  "In the morning the children found a small boat under the trees near the house.",
  "Nobody in the town could say who had built it or where it had come from.",
  "They pushed it into the water and it moved away as if it knew the way.",
  "When the rain began they were already far from the road and could not turn back.",
  "At night there was a light on the other side, and someone was singing.",
  "The oldest girl said that it would be better to wait until the sun came up.",
  "So they sat together, told each other stories and tried not to fall asleep.",
];

/** About so many words of a story; another `number` begins differently. */
function story(number, numWords) {
  const words = `Story number ${number}.`.split(" ");
  for (let i = number; words.length < numWords; i++) {
    words.push(...SENTENCES[(i * 3 + number) % SENTENCES.length].split(" "));
  }
  return words.slice(0, Math.max(numWords, 4)).join(" ");
}

/** So many long requests that the pool can hold their prompts, but not their answers: some must be preempted. */
export function fillThePool({ num_blocks, block_size, max_num_seqs, max_model_len }) {
  const capacity = num_blocks * block_size;
  const byLength = Math.ceil((1.5 * capacity) / max_model_len); // fewer could not fill it
  const numPrompts = Math.min(Math.max(byLength, 10), max_num_seqs, Math.max(2, Math.floor(num_blocks / 3)));
  const share = Math.floor(capacity / numPrompts);
  const numWords = Math.max(4, Math.floor(share * 0.65)); // a sentence's full stop is a token, too
  const maxTokens = Math.max(8, Math.min(Math.ceil(share * 0.6), max_model_len - Math.ceil(numWords * 1.3)));
  const prompts = Array.from({ length: numPrompts }, (_, i) => story(i + 1, numWords));
  return { prompts, maxTokens, mode: "text", ignoreEnd: true, leaderFirst: false };
}

const QUESTIONS = [
  "What did the children find?",
  "Who was singing?",
  "Why did they not turn back?",
  "What did the oldest girl say?",
  "Where was the boat?",
  "What did the old man look at?",
  "How did they stay awake?",
  "What would you have done?",
];

/** Eight prompts with one long beginning: those after the first find it in the prefix cache. */
export function sharedPrefix({ num_blocks, block_size, max_model_len }) {
  const numTokens = Math.min(14 * block_size, Math.floor((num_blocks * block_size) / 3), max_model_len - 80);
  const beginning = story(1, Math.floor(numTokens / 1.15));
  const prompts = QUESTIONS.map((question) => `${beginning} Question: ${question} Answer:`);
  return { prompts, maxTokens: 40, mode: "text", ignoreEnd: false, leaderFirst: true };
}

export function oneQuestion() {
  return {
    prompts: ["Why is the sky blue? Answer in two sentences."],
    maxTokens: 80,
    mode: "chat",
    ignoreEnd: false,
    leaderFirst: false,
  };
}
