/**
 * Small helpers to make and change elements. Texts go in as text, never as HTML.
 *
 * What this leaves out: a framework. Each panel keeps its elements, and writes only what has changed.
 */

/** A new element: `make("p", {class: "x", title: "y"}, "text", child)`; attributes that are null are left out. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  return fill(element, attributes, children);
}

/** The same for SVG. */
export function makeSvg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) {
      element.addEventListener(name.slice(2), value);
    } else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children);
  return element;
}

export function byId(id) {
  return document.getElementById(id);
}

/** Write a text only if it is another one. */
export function setText(element, text) {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}

/** Write an attribute only if it is another one; null takes it away. */
export function setAttribute(element, name, value) {
  if (value === null) {
    if (element.hasAttribute(name)) {
      element.removeAttribute(name);
    }
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, value);
  }
}

/** A request's label on its colour. */
export function chip({ id, label, colour }) {
  return make("span", { class: "chip", "data-colour": colour, "data-chip": id, title: id }, label);
}

/** A sentence of parts (`words.js`) in an element. */
export function say(element, parts) {
  element.replaceChildren(...parts.map((part) => (typeof part === "string" ? part : chip(part))));
  return element;
}

/** Show a sentence to people at the top of the page, or nothing. */
export function notify(text) {
  const notice = byId("notice");
  setText(notice, text ?? "");
  notice.hidden = !text;
}
