/**
 * Dark or light: the system's wish, unless the reader (or `?theme=`) says otherwise; and the colours for canvases.
 *
 * What this leaves out: the colours themselves. They are in `style.css`, and are read from there.
 */

import { NUM_COLOURS } from "./colours.js";

const KEY = "mini-vllm.theme";
const NAMES = ["ink", "dim", "line", "panel", "track", "accent", "alarm", "on-colour"];
const system = window.matchMedia("(prefers-color-scheme: dark)");
let cached = null;

/** Begin with the theme of the address, or of the last visit; `onChange` is called after each change. */
export function startTheme(button, parameters, onChange) {
  const asked = parameters.get("theme") ?? remembered();
  if (asked === "dark" || asked === "light") {
    document.documentElement.dataset.theme = asked;
  }
  const changed = () => {
    cached = null;
    onChange();
  };
  system.addEventListener("change", changed);
  button.addEventListener("click", () => {
    const { dataset } = document.documentElement;
    const isDark = dataset.theme ? dataset.theme === "dark" : system.matches;
    dataset.theme = isDark ? "light" : "dark";
    remember(dataset.theme);
    changed();
  });
}

/** Inside of another page of this site: be as dark or light as it is, also when that changes. */
export function followFrame(onChange) {
  const frame = window.frameElement;
  if (frame === null) {
    return;
  }
  const { body, documentElement, defaultView } = frame.ownerDocument;
  const look = () => {
    const scheme = defaultView.getComputedStyle(frame).colorScheme;
    if (scheme === "dark" || scheme === "light") {
      document.documentElement.dataset.theme = scheme;
      cached = null;
      onChange();
    }
  };
  const observer = new MutationObserver(look);
  [body, documentElement].forEach((element) => observer.observe(element, { attributes: true }));
  look();
}

/** The colours of the present theme as CSS values: by name, and `colours[i]` of the requests. */
export function palette() {
  if (cached === null) {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    cached = Object.fromEntries(NAMES.map((name) => [name, read(`--${name}`)]));
    cached.colours = Array.from({ length: NUM_COLOURS }, (_, i) => read(`--colour-${i}`));
    cached.font = read("--mono");
  }
  return cached;
}

function remembered() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // a frame without storage
  }
}

function remember(theme) {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // It is forgotten with the page.
  }
}
