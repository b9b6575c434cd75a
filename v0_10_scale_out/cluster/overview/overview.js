/**
 * Asks once a second what each replica has, what was routed to it by which rule, and where the last prompts went. A
 * replica that comes gets a row and a frame with its own page; one that has gone loses both.
 */

const ROOT = new URL("../", import.meta.url); // this module is /visualizer/overview.js
const RULES = ["prefix", "new", "busy", "balanced", "random", "unreachable", "named"];
const SECONDS = 1;

const byId = (id) => document.getElementById(id);

function element(name, text = "") {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}

function rowOf(replica, rules) {
  const row = element("tr");
  const blocks = `${replica.num_blocks - replica.num_free_blocks} of ${replica.num_blocks}`;
  const routed = rules.map((rule) => replica.routed[rule] ?? 0);
  for (const value of [replica.name, replica.num_running, replica.num_waiting, blocks, ...routed]) {
    row.append(element("td", value));
  }
  return row;
}

function promptOf({ request_id, replica, rule, num_held, num_blocks }) {
  const row = element("tr");
  row.append(...[request_id, replica, rule, `${num_held} of ${num_blocks}`].map((value) => element("td", value)));
  return row;
}

function frameOf(name) {
  const figure = element("figure");
  const frame = element("iframe");
  frame.title = `Replica ${name}`;
  frame.src = new URL(`replicas/${encodeURIComponent(name)}/visualizer/`, ROOT);
  figure.dataset.name = name;
  figure.append(element("figcaption", `Replica ${name}`), frame);
  return figure;
}

function show({ replicas, recent }) {
  const rules = RULES.filter((rule) => replicas.some((replica) => replica.routed[rule]));
  const heads = ["replica", "running", "waiting", "blocks in use", ...rules];
  byId("heads").replaceChildren(...heads.map((head) => element("th", head)));
  byId("rows").replaceChildren(...replicas.map((replica) => rowOf(replica, rules)));
  byId("recent").replaceChildren(...recent.map(promptOf));
  const names = new Set(replicas.map((replica) => replica.name));
  for (const figure of [...byId("frames").children]) {
    if (!names.delete(figure.dataset.name)) {
      figure.remove();
    }
  }
  byId("frames").append(...[...names].map(frameOf));
  byId("status").textContent = `${replicas.length} replica${replicas.length === 1 ? "" : "s"}`;
}

async function refresh() {
  try {
    const response = await fetch(new URL("replicas", ROOT));
    if (!response.ok) {
      throw new Error(`HTTP ${response.status}`);
    }
    show(await response.json());
  } catch (error) {
    byId("status").textContent = `No answer: ${error.message}`;
  }
  setTimeout(refresh, SECONDS * 1000);
}

refresh();
