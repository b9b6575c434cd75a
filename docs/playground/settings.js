/**
 * The setting: its dials, and how it is written into the address. The names are those of `simulator/scenario.py`, which
 * also knows the ranges and the defaults; they come with the manifest.
 *
 * In the address stands what differs from the defaults, and edited functions as one packed text.
 */

import { make } from "../visualizer/dom.js";

const POWERS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192];
const has =
  (...milestones) =>
  ({ milestone }) =>
    milestones.includes(milestone);
const CACHE = ["v0_6_prefix_cache", "v0_7_speculative", "v0_8_visualizer"];
const DRAFTS = ["v0_7_speculative", "v0_8_visualizer"];
const drawn = ({ settings }) => settings.requests.trim() === "";
const arrives =
  (...kinds) =>
  (state) =>
    drawn(state) && kinds.includes(state.settings.arrival);

/** Groups of dials: [title, [name, label, {stops, step, shown, hint}] ...]. A dial with `stops` has a slider. */
export const GROUPS = [
  [
    "Requests",
    ["arrival", "Arrival", { shown: drawn }],
    ["num_requests", "How many", { stops: range(1, 64), shown: drawn }],
    ["rate", "Arrivals per second", { step: "any", shown: arrives("poisson", "bursts") }],
    ["min_prompt", "Prompt, from", { shown: drawn }],
    ["max_prompt", "to tokens", { shown: drawn }],
    ["min_answer", "Answer, from", { shown: drawn }],
    ["max_answer", "to tokens", { shown: drawn }],
    ["long_prompt", "The long prompt", { shown: arrives("long") }],
    ["long_after", "comes after seconds", { step: "any", shown: arrives("long") }],
    ["shared_prefix", "Shared beginning", { stops: range(0, 512, 16) }],
    ["prefix_groups", "Different beginnings", { shown: ({ settings }) => settings.shared_prefix > 0 }],
    ["num_choices", "Answers per request", {}],
    ["requests", "Or one by one", { hint: "37+20, 26+16@0.5: prompt + answer @ second" }],
  ],
  [
    "Scheduler",
    ["token_budget", "Token budget of a step", { stops: POWERS.slice(2) }],
    ["max_num_seqs", "Most that run at once", { stops: range(1, 64) }],
  ],
  [
    "Pool",
    ["num_blocks", "Blocks", { stops: [...range(4, 64, 2), ...range(72, 256, 8), 320, 384, 448, 512, 768, 1024] }],
    ["block_size", "Tokens per block", { stops: POWERS.slice(0, 9) }],
    ["prefix_caching", "Prefix cache", { shown: has(...CACHE) }],
  ],
  [
    "Drafts",
    ["num_speculative_tokens", "Drafts per request", { stops: range(0, 16), shown: has(...DRAFTS) }],
    [
      "acceptance",
      "Share that can be guessed",
      { stops: range(0, 10).map((tenth) => tenth / 10), step: "any", shown: has(...DRAFTS) },
    ],
    ["other_acceptance", "of every second request", { step: "any", shown: has(...DRAFTS), hint: "-1: the same" }],
  ],
  ["Chance", ["seed", "Seed", { stops: range(0, 50) }]],
];

function range(first, last, step = 1) {
  return Array.from({ length: Math.floor((last - first) / step) + 1 }, (_, i) => first + i * step);
}

/** The dials as elements. `onChange` is called after each change, with the state changed already. */
export class Dials {
  constructor(manifest, state, onChange) {
    this.manifest = manifest;
    this.state = state;
    this.onChange = onChange;
    this.dials = [];
    this.groups = [];
    this.element = make("form", {
      class: "dials",
      "aria-label": "Setting",
      onsubmit: (event) => event.preventDefault(),
    });
    for (const [title, ...dials] of GROUPS) {
      const group = make("fieldset", {}, make("legend", {}, title), ...dials.map((dial) => this.dial(...dial)));
      this.element.append(group);
      this.groups.push(group);
    }
    this.show();
  }

  dial(name, label, { stops = null, step = 1, shown = () => true, hint = null }) {
    const initial = this.manifest.defaults[name];
    const input = this.input(name, initial, step);
    input.id = `dial-${name}`;
    const row = make("div", { class: "dial", "data-dial": name }, make("label", { for: input.id }, label), input);
    let slider = null;
    if (stops) {
      slider = make("input", {
        type: "range",
        min: 0,
        max: stops.length - 1,
        step: 1,
        "aria-label": `${label}, slider`,
      });
      slider.addEventListener("input", () => {
        input.value = stops[Number(slider.value)];
        this.changed(name, input);
      });
      row.append(slider);
    }
    if (hint) {
      row.append(make("small", {}, hint));
    }
    input.addEventListener("input", () => this.changed(name, input));
    this.dials.push({ name, input, slider, stops, row, shown });
    return row;
  }

  input(name, initial, step) {
    if (name === "arrival") {
      const kinds = Object.entries(this.manifest.arrivals);
      return make("select", {}, ...kinds.map(([value, text]) => make("option", { value }, text)));
    }
    if (typeof initial === "boolean") {
      return make("input", { type: "checkbox" });
    }
    if (typeof initial === "string") {
      return make("input", { type: "text", spellcheck: "false", autocomplete: "off" });
    }
    const [min, max] = this.manifest.ranges[name];
    return make("input", { type: "number", min, max, step });
  }

  changed(name, input) {
    const value =
      input.type === "checkbox" ? input.checked : input.type === "number" ? Number(input.value) : input.value;
    if (input.type === "number" && (input.value === "" || !input.checkValidity())) {
      input.classList.add("wrong");
      return;
    }
    input.classList.remove("wrong");
    this.state.settings = { ...this.state.settings, [name]: value };
    this.show(input);
    this.onChange(name);
  }

  /** Show the state, but leave alone what the reader types into. */
  show(typing = null) {
    for (const { name, input, slider, stops, row, shown } of this.dials) {
      const value = this.state.settings[name];
      row.hidden = !shown(this.state);
      if (input !== typing) {
        input.classList.remove("wrong");
        if (input.type === "checkbox") {
          input.checked = value;
        } else {
          input.value = value;
        }
      }
      if (slider) {
        const after = stops.findIndex((stop) => stop >= value);
        slider.value = after < 0 ? stops.length - 1 : after;
      }
    }
    for (const group of this.groups) {
      group.hidden = [...group.querySelectorAll(".dial")].every((row) => row.hidden);
    }
  }

  set disabled(isDisabled) {
    this.groups.forEach((group) => (group.disabled = isDisabled));
  }
}

/** The address's query for a state. */
export async function toQuery(state, defaults) {
  const query = new URLSearchParams();
  query.set("milestone", state.milestone);
  for (const [name, value] of Object.entries(state.settings)) {
    if (value !== defaults[name]) {
      query.set(name, value);
    }
  }
  if (state.challenge) {
    query.set("challenge", state.challenge);
  }
  if (Object.keys(state.edits).length > 0) {
    query.set("edits", await pack(JSON.stringify(state.edits)));
  }
  return query;
}

/** A state from an address's query, or null if it names none. */
export async function fromQuery(query, manifest) {
  const milestone = query.get("milestone");
  if (!Object.hasOwn(manifest.milestones, milestone ?? "")) {
    return null;
  }
  if ([...query.keys()].length === 1) {
    return { milestone };
  }
  const settings = { ...manifest.defaults };
  for (const [name, initial] of Object.entries(manifest.defaults)) {
    if (query.has(name)) {
      const text = query.get(name);
      const value = typeof initial === "number" ? Number(text) : typeof initial === "boolean" ? text === "true" : text;
      settings[name] = Number.isNaN(value) ? initial : value;
    }
  }
  const edits = query.has("edits") ? JSON.parse(await unpack(query.get("edits"))) : {};
  return { milestone, settings, edits, challenge: query.get("challenge") };
}

/** A text, compressed, in letters that an address may have. */
export async function pack(text) {
  const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  return btoa(String.fromCharCode(...bytes))
    .replaceAll("+", "-")
    .replaceAll("/", "_")
    .replaceAll("=", "");
}

export async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed.replaceAll("-", "+").replaceAll("_", "/")), (letter) =>
    letter.charCodeAt(0),
  );
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Response(stream).text();
}
