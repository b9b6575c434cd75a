/**
 * A simulated run as a source of the visualizer's page, which stands in a frame: the third one beside live and recording.
 *
 * To play it is what a recording does. What differs: it begins at a step if one is asked for, and the frame grows with its
 * content. The theme follows the page around by itself (`../visualizer/theme.js`).
 */

import { RecordingSource } from "../visualizer/recording.js";

const LONGEST = 12; // seconds of playing, at most, unless the reader wants it slower
const SPEEDS = [1, 2, 4, 8];

/** Whether the reader wants no motion: then nothing plays by itself. */
const isStill = () => window.matchMedia("(prefers-reduced-motion: reduce)").matches;

class SimulatedSource extends RecordingSource {
  constructor(messages, step) {
    super(messages, "simulated");
    this.kind = "simulated";
    this.firstStep = step;
    this.isHeld = step !== null && !isStill();
  }

  start(to) {
    super.start(to);
    to.status({ state: "replay", text: "Simulated", detail: null, needsKey: false });
  }

  /** The page plays whatever comes into sight; a run that was asked to stand at a step stays there the first time. */
  play() {
    if (this.isHeld) {
      this.isHeld = false;
    } else {
      super.play();
    }
  }
}

export class Drawing {
  constructor(frame, onColours) {
    this.frame = frame;
    this.onColours = onColours;
    this.ready = new Promise((resolve) => {
      frame.addEventListener("load", () => {
        this.grow();
        this.lendColours();
        resolve();
      });
    });
    const later = () => window.requestAnimationFrame(() => this.lendColours()); // once the frame has its theme
    new MutationObserver(later).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
  }

  get visualizer() {
    return this.frame.contentWindow.visualizer;
  }

  /** Draw a run; at this step if one is given, and played from its beginning otherwise. */
  async show(messages, step = null) {
    await this.ready;
    const source = new SimulatedSource(messages, step);
    this.visualizer.use(source);
    if (step !== null) {
      source.goToStep(step);
    } else if (isStill()) {
      source.goTo(source.track.stepEnds[Math.floor(source.track.stepEnds.length / 2)] ?? 1); // something to look at
    } else {
      source.setSpeed(SPEEDS.find((speed) => source.track.duration / speed <= LONGEST) ?? SPEEDS.at(-1));
    }
  }

  /** Be as high as what is in it. */
  grow() {
    const { body } = this.frame.contentDocument;
    new ResizeObserver(
      () => (this.frame.style.height = `${Math.ceil(body.getBoundingClientRect().height) + 2}px`),
    ).observe(body);
  }

  /** Tell the page around the colours of the requests. */
  lendColours() {
    const root = this.frame.contentDocument?.documentElement;
    if (root) {
      const style = this.frame.contentWindow.getComputedStyle(root);
      this.onColours(Array.from({ length: 12 }, (_, i) => style.getPropertyValue(`--colour-${i}`).trim()));
    }
  }
}
