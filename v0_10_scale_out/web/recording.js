/**
 * The source that plays a recording, forwards and backwards. The parsing and the seeking need no DOM.
 *
 * A position is a number of messages that have been folded: 1 is the snapshot at the beginning. Every few hundred
 * messages a copy of the state is kept (a keyframe). To seek is to copy the keyframe before a position, and to fold the
 * few messages from there.
 * The player's clock is the recording's, except that a silence longer than a second takes one second.
 * What this leaves out: messages that are cut off, at the end of a file that was still being written.
 */

import { copy, createState, fold } from "./state.js";

const KEYFRAME_EVERY = 500; // messages
const MAX_KEYFRAMES = 200;
const LONGEST_SILENCE = 1; // seconds
const LONGEST_FRAME = 0.25; // seconds: a tab that was hidden doesn't jump
export const SPEEDS = [0.25, 0.5, 1, 2, 4, 8];

/** The messages of a JSONL file. */
export function parseRecording(text) {
  const lines = text.split("\n").filter((line) => line.trim() !== "");
  const messages = [];
  for (const [index, line] of lines.entries()) {
    try {
      messages.push(JSON.parse(line));
    } catch {
      if (index < lines.length - 1) {
        throw new Error(`Line ${index + 1} of the recording isn't JSON. A recording has one message a line.`);
      }
    }
  }
  if (messages[0]?.type !== "snapshot") {
    throw new Error("This file isn't a recording of a run: a recording begins with a snapshot of the engine.");
  }
  return messages;
}

/** The messages of a run, and the state after any of them. */
export class Track {
  constructor(messages) {
    this.messages = messages;
    this.clock = []; // of each message: when it is played, in seconds
    this.stepEnds = []; // positions just after a step
    this.preemptions = []; // when they are played
    this.keyframes = [];
    this.keyframeEvery = Math.max(KEYFRAME_EVERY, Math.ceil(messages.length / MAX_KEYFRAMES));
    const state = createState();
    let now = 0;
    for (const [index, message] of messages.entries()) {
      const silence = index === 0 ? 0 : message.time - messages[index - 1].time;
      now += Math.min(Math.max(silence, 0), LONGEST_SILENCE);
      this.clock.push(now);
      if (index % this.keyframeEvery === 0) {
        this.keyframes.push(copy(state));
      }
      fold(state, message);
      if (message.type === "step") {
        this.stepEnds.push(index + 1);
      } else if (message.type === "request_preempted") {
        this.preemptions.push(now);
      }
    }
    this.duration = now;
  }

  /** The state after the first `position` messages. */
  stateAt(position) {
    const index = Math.min(Math.floor(position / this.keyframeEvery), this.keyframes.length - 1);
    const state = copy(this.keyframes[index]);
    for (let i = index * this.keyframeEvery; i < position; i++) {
      fold(state, this.messages[i]);
    }
    return state;
  }

  /** How many messages have been played at a moment: at least the snapshot. */
  positionAt(seconds) {
    let [low, high] = [1, this.messages.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      [low, high] = this.clock[middle] <= seconds ? [middle + 1, high] : [low, middle];
    }
    return low;
  }
}

export class RecordingSource {
  constructor(messages, name) {
    this.kind = "recording";
    this.name = name;
    this.engine = null;
    this.player = this;
    this.track = new Track(messages);
    this.position = 1;
    this.now = 0; // the player's clock, in seconds
    this.speed = 1;
    this.playing = false;
    this.frame = 0;
    this.onChange = () => {};
    this.to = null;
  }

  start(to) {
    this.to = to;
    to.status({ state: "replay", text: "Replay", detail: null, needsKey: false });
    this.goTo(1);
  }

  stop() {
    this.playing = false;
    this.to = null;
  }

  /** Play from here; from the beginning again if this is the end. */
  play() {
    if (this.playing || !this.to) {
      return;
    }
    if (this.position >= this.track.messages.length) {
      this.goTo(1);
    }
    this.playing = true;
    window.cancelAnimationFrame(this.frame); // of a run that was paused in this very frame
    let before = null;
    const tick = (moment) => {
      if (this.playing) {
        this.advance(before === null ? 0 : Math.min((moment - before) / 1000, LONGEST_FRAME));
        before = moment;
        this.frame = window.requestAnimationFrame(tick);
      }
    };
    this.frame = window.requestAnimationFrame(tick);
    this.onChange();
  }

  pause() {
    this.playing = false;
    this.onChange();
  }

  advance(seconds) {
    this.now = Math.min(this.now + seconds * this.speed, this.track.duration);
    const position = this.track.positionAt(this.now);
    if (position > this.position) {
      this.to.messages(this.track.messages.slice(this.position, position));
      this.position = position;
    }
    if (position >= this.track.messages.length) {
      this.playing = false;
    }
    this.onChange();
  }

  setSpeed(speed) {
    this.speed = speed;
    this.onChange();
  }

  /** Be at a moment of the player's clock. */
  seek(seconds) {
    this.goTo(this.track.positionAt(seconds), seconds);
  }

  /** Be where so many messages have been folded. */
  goTo(position, seconds = this.track.clock[position - 1]) {
    this.now = seconds;
    this.position = position;
    this.to?.state(this.track.stateAt(position));
    this.onChange();
  }

  /** Be at the end of the next step, or of the one before. */
  step(direction) {
    this.playing = false;
    const ends = this.track.stepEnds;
    const next = direction > 0 ? ends.find((end) => end > this.position) : ends.findLast((end) => end < this.position);
    this.goTo(next ?? (direction > 0 ? this.track.messages.length : 1));
  }

  /** Be at the end of the step of this number, if the recording has it. */
  goToStep(number) {
    const end = this.track.stepEnds.find((position) => this.track.messages[position - 1].number === number);
    if (end !== undefined) {
      this.playing = false;
      this.goTo(end);
    }
  }
}
