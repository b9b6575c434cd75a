/**
 * A request's short name and its colour: pure functions, no DOM.
 *
 * A colour is a place on a wheel of twelve; `style.css` says what each looks like in dark and in light. It follows from
 * the request's id, and is moved along the wheel where a neighbour in order of arrival has one that looks alike.
 * What this leaves out: more than twelve colours. With many requests a colour comes back, and labels tell them apart.
 */

export const NUM_COLOURS = 12;
const STRIDE = 5; // no divisor in common with twelve: so many steps visit each place once
const MIN_DISTANCES = [3, 2, 1, 1]; // from the last request, the one before it, and so on

/** A number that follows from a text alone (FNV-1a). */
export function hash(text) {
  let value = 0x811c9dc5;
  for (let i = 0; i < text.length; i++) {
    value = Math.imul(value ^ text.charCodeAt(i), 0x01000193) >>> 0;
  }
  return (value ^ (value >>> 15)) >>> 0;
}

/** How far two places on the wheel are from each other. */
export function distance(a, b) {
  const difference = Math.abs(a - b) % NUM_COLOURS;
  return Math.min(difference, NUM_COLOURS - difference);
}

/** The colour of a request that arrives after others: `recent` are theirs, the newest first. */
export function pickColour(requestId, recent) {
  const first = hash(requestId) % NUM_COLOURS;
  for (let i = 0; i < NUM_COLOURS; i++) {
    const colour = (first + i * STRIDE) % NUM_COLOURS;
    if (MIN_DISTANCES.every((least, age) => age >= recent.length || distance(colour, recent[age]) >= least)) {
      return colour;
    }
  }
  return first;
}

/** The short name of the request that came as number `index`: A to Z, then AA, AB, ... */
export function labelOf(index) {
  let label = "";
  for (let rest = index + 1; rest > 0; rest = Math.floor((rest - 1) / 26)) {
    label = String.fromCharCode(65 + ((rest - 1) % 26)) + label;
  }
  return label;
}
