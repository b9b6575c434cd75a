/**
 * The bar that plays a recording: play and pause, a step back or ahead, the speed, and a slider over the whole run.
 *
 * Marks on the slider show where a request was preempted. What this leaves out: the playing itself (`recording.js`).
 */

import { byId, make, makeSvg, setAttribute, setText } from "./dom.js";
import { SPEEDS } from "./recording.js";

const MAX_MARKS = 200;
const PLAY = "M4 2 L14 8 L4 14 Z";
const PAUSE = "M3 2 h3.6 v12 h-3.6 Z M9.4 2 h3.6 v12 h-3.6 Z";
const PREVIOUS = "M2 2 h2.4 v12 h-2.4 Z M14 2 L5.4 8 L14 14 Z";
const NEXT = "M11.6 2 h2.4 v12 h-2.4 Z M2 2 L10.6 8 L2 14 Z";

export class ReplayBar {
  constructor(player, readState) {
    this.player = player;
    this.readState = readState;
    const { track } = player;
    const button = (id, shape, label, onclick) =>
      make("button", { type: "button", id, "aria-label": label, title: label, onclick }, icon(shape));
    this.playButton = button("play", PLAY, "Play", () => this.toggle());
    this.slider = make("input", {
      id: "seek",
      type: "range",
      min: 0,
      max: Math.round(track.duration * 1000),
      step: 1,
      value: 0,
    });
    setAttribute(this.slider, "aria-label", "Moment of the recording");
    this.slider.addEventListener("input", () => {
      const seconds = Number(this.slider.value) / 1000; // before pausing, which writes it
      player.pause();
      player.seek(seconds);
    });
    this.speed = make("select", { id: "speed", "aria-label": "Speed" }, ...SPEEDS.map(speedOption));
    this.speed.addEventListener("change", () => player.setSpeed(Number(this.speed.value)));
    this.speed.value = player.speed;
    this.place = make("p", { class: "place" });
    this.root = byId("replay");
    this.root.hidden = false;
    this.root.replaceChildren(
      make(
        "div",
        { class: "buttons" },
        button("previous", PREVIOUS, "Previous step", () => player.step(-1)),
        this.playButton,
        button("next", NEXT, "Next step", () => player.step(1)),
      ),
      make("div", { class: "seek" }, this.slider, marks(track)),
      this.place,
      this.speed,
    );
    this.onKey = (event) => {
      const { target } = event;
      const isTyping = /^(INPUT|TEXTAREA|SELECT|BUTTON)$/.test(target.tagName);
      if (event.key === " " && !isTyping && !target.closest("[role=log], [role=listbox]")) {
        event.preventDefault();
        this.toggle();
      }
    };
    document.addEventListener("keydown", this.onKey);
    player.onChange = () => this.render();
    this.render();
  }

  remove() {
    document.removeEventListener("keydown", this.onKey);
    this.root.hidden = true;
  }

  toggle() {
    if (this.player.playing) {
      this.player.pause();
    } else {
      this.player.play();
    }
  }

  render() {
    const { now, playing, track, speed } = this.player;
    setAttribute(this.playButton.querySelector("path"), "d", playing ? PAUSE : PLAY);
    setAttribute(this.playButton, "aria-label", playing ? "Pause" : "Play");
    const value = String(Math.round(now * 1000));
    if (this.slider.value !== value) {
      this.slider.value = value;
    }
    this.slider.style.setProperty("--done", `${(100 * now) / Math.max(track.duration, 1e-9)}%`);
    const { step } = this.readState();
    const [moment, end] = [now.toFixed(1), track.duration.toFixed(1)];
    const text = `${moment} of ${end} s · step ${step < 0 ? "–" : step} of ${this.lastStep() ?? "–"}`;
    setText(this.place, text);
    setAttribute(this.slider, "aria-valuetext", text);
    if (Number(this.speed.value) !== speed) {
      this.speed.value = speed;
    }
  }

  lastStep() {
    const { messages, stepEnds } = this.player.track;
    return stepEnds.length > 0 ? messages[stepEnds.at(-1) - 1].number : null;
  }
}

function icon(shape) {
  const box = { class: "icon-shape", viewBox: "0 0 16 16", width: 15, height: 15, "aria-hidden": "true" };
  return makeSvg("svg", box, makeSvg("path", { d: shape }));
}

function speedOption(speed) {
  const names = { 0.25: "¼×", 0.5: "½×" };
  return make("option", { value: speed }, names[speed] ?? `${speed}×`);
}

/** Where requests were preempted, as marks along the slider. */
function marks({ preemptions, duration }) {
  const svg = makeSvg("svg", {
    class: "marks",
    viewBox: "0 0 1000 6",
    preserveAspectRatio: "none",
    "aria-hidden": "true",
  });
  const every = Math.max(1, Math.ceil(preemptions.length / MAX_MARKS));
  preemptions.forEach((seconds, i) => {
    if (i % every === 0) {
      svg.append(makeSvg("rect", { x: (1000 * seconds) / Math.max(duration, 1e-9) - 1, y: 0, width: 2.5, height: 6 }));
    }
  });
  return svg;
}
