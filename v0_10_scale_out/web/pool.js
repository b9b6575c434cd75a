/**
 * The pool as a grid of blocks: whose each is, whether several share it, whether the prefix cache can find it.
 *
 * Blocks are elements that stay; only those that changed are written. The arrow keys walk through them, and the block
 * that has the focus or the pointer is told about below the grid.
 * What this leaves out: how full a request's last block is.
 */

import { byId, make, say, setAttribute, setText } from "./dom.js";
import { nameOf } from "./state.js";

const MAX_HEIGHT = 470; // pixels, if cells of the least size allow it
const [MIN_CELL, MAX_CELL] = [6, 54]; // pixels, with the gap
const [MIN_COLUMNS, COLUMNS_STEP] = [8, 4]; // rows of a round number are easier to count
const [LARGE, PAUSE] = [1024, 48]; // a pool of more blocks is painted anew only after so many milliseconds
const LABEL_SIZE = 16; // smaller cells have no room for a label

/** What a block is: `free`, `cached` (free, but it can still be found), `owned` or `shared`. */
export function blockState({ owners, cached }) {
  if (owners.length === 0) {
    return cached ? "cached" : "free";
  }
  return owners.length === 1 ? "owned" : "shared";
}

export class PoolPanel {
  constructor(view) {
    this.view = view;
    this.grid = byId("pool");
    this.cells = [];
    this.known = []; // what each cell shows: {state, owners, cached}
    this.pending = new Set(); // numbers of blocks that are not drawn as they are
    this.time = -Infinity;
    this.lit = new Set(); // numbers of blocks
    this.columns = 1;
    this.hasLabels = true;
    this.focused = 0;
    this.told = null; // the number of the block that is told about
    this.state = null;
    this.grid.addEventListener("pointerover", (event) => this.tell(numberOf(event.target)));
    this.grid.addEventListener("pointerleave", () => this.tell(null));
    this.grid.addEventListener("focusin", (event) => this.tell(numberOf(event.target)));
    this.grid.addEventListener("focusout", () => this.tell(null));
    this.grid.addEventListener("keydown", (event) => this.walk(event));
    this.grid.addEventListener("click", (event) => this.focus(numberOf(event.target)));
    new ResizeObserver(() => this.arrange()).observe(this.grid);
  }

  /** Returns whether it has something newer to show later. */
  render(state, dirty, now) {
    this.state = state;
    if (!state.ready) {
      this.build(0);
      return false;
    }
    if (state.blocks.length !== this.cells.length) {
      this.build(state.blocks.length);
    }
    dirty.blocks.forEach((number) => this.pending.add(number));
    if (dirty.all) {
      state.blocks.forEach((_, number) => this.pending.add(number));
    } else if (this.pending.size === 0) {
      return false;
    } else if (this.cells.length > LARGE && now - this.time < PAUSE) {
      return true;
    }
    this.time = now;
    this.pending.forEach((number) => this.renderBlock(state.blocks[number], number));
    this.renderSummary(state);
    this.renderLit();
    if (this.told !== null && this.pending.has(this.told)) {
      this.describe(this.told);
    }
    this.pending.clear();
    return false;
  }

  build(numBlocks) {
    this.cells = Array.from({ length: numBlocks }, (_, number) =>
      make("div", { class: "block", role: "option", "data-block": number, tabindex: number === 0 ? 0 : -1 }),
    );
    this.known = Array.from({ length: numBlocks }, () => ({}));
    this.counts = { free: 0, cached: 0, owned: 0, shared: 0 };
    this.pending.clear();
    this.focused = 0;
    this.told = null;
    this.grid.replaceChildren(...this.cells);
    this.arrange();
  }

  renderBlock(block, number) {
    const known = this.known[number];
    if (known.owners === block.owners && known.cached === block.cached && known.state !== undefined) {
      return;
    }
    const cell = this.cells[number];
    const state = blockState(block);
    const names = block.owners.map((id) => nameOf(this.state, id));
    setAttribute(cell, "data-state", state);
    setAttribute(cell, "data-owners", block.owners.join(" "));
    const last = state === "cached" ? this.state.names.get(block.last) : null; // whose it was
    setAttribute(cell, "data-colour", (names[0] ?? last)?.colour ?? null);
    setAttribute(cell, "data-colour2", names.length > 1 ? names[1].colour : null);
    setAttribute(cell, "data-cached", block.cached ? "" : null);
    const owners = names.map((name) => name.label).join(", ");
    setAttribute(cell, "aria-label", `Block ${number}, ${state}${owners ? ` by ${owners}` : ""}`);
    this.counts[state] += 1;
    if (known.state !== undefined) {
      this.counts[known.state] -= 1;
    }
    this.known[number] = { state, owners: block.owners, cached: block.cached, label: labelFor(names) };
    setText(cell, this.hasLabels ? this.known[number].label : "");
  }

  renderSummary(state) {
    const { counts } = this;
    const numUsed = counts.owned + counts.shared;
    const parts = [`${numUsed} of ${this.cells.length} blocks in use`];
    if (counts.shared) {
      parts.push(`${counts.shared} shared`);
    }
    if (counts.cached) {
      parts.push(`${counts.cached} cached`);
    }
    setText(byId("pool-summary"), `${parts.join(", ")}; ${state.settings.block_size} tokens each`);
  }

  renderLit() {
    const lit = new Set();
    for (const id of this.view.lit) {
      this.state?.requests.get(id)?.blockTable.forEach((block) => lit.add(block));
    }
    this.lit.forEach((number) => lit.has(number) || this.cells[number]?.classList.remove("lit"));
    lit.forEach((number) => this.lit.has(number) || this.cells[number].classList.add("lit"));
    this.lit = lit;
    this.grid.classList.toggle("dimmed", lit.size > 0);
  }

  /** Choose the largest cells that fit. */
  arrange() {
    const width = this.grid.clientWidth;
    if (width === 0 || this.cells.length === 0) {
      return;
    }
    const sizeOf = (columns) => Math.min(MAX_CELL, Math.floor((width + 1) / columns));
    const fits = (columns) => Math.ceil(this.cells.length / columns) * sizeOf(columns) <= MAX_HEIGHT;
    const most = Math.floor((width + 1) / MIN_CELL);
    this.columns = MIN_COLUMNS;
    while (!fits(this.columns) && this.columns + COLUMNS_STEP <= most) {
      this.columns += COLUMNS_STEP;
    }
    const size = sizeOf(this.columns);
    this.grid.style.setProperty("--cell", `${size - (size > 12 ? 2 : 1)}px`);
    this.grid.style.setProperty("--gap", `${size > 12 ? 2 : 1}px`);
    this.grid.style.setProperty("--columns", this.columns);
    const hasLabels = size >= LABEL_SIZE;
    this.grid.classList.toggle("small", !hasLabels);
    if (hasLabels !== this.hasLabels) {
      this.hasLabels = hasLabels;
      this.cells.forEach((cell, number) => setText(cell, hasLabels ? (this.known[number].label ?? "") : ""));
    }
  }

  walk(event) {
    const last = this.cells.length - 1;
    const moves = {
      ArrowLeft: this.focused - 1,
      ArrowRight: this.focused + 1,
      ArrowUp: this.focused - this.columns,
      ArrowDown: this.focused + this.columns,
      Home: event.ctrlKey ? 0 : this.focused - (this.focused % this.columns),
      End: event.ctrlKey ? last : Math.min(last, this.focused - (this.focused % this.columns) + this.columns - 1),
    };
    const next = moves[event.key];
    if (next !== undefined) {
      event.preventDefault();
      this.focus(next < 0 || next > last ? null : next);
    }
  }

  focus(number) {
    if (number !== null) {
      this.cells[this.focused].tabIndex = -1;
      this.focused = number;
      this.cells[number].tabIndex = 0;
      this.cells[number].focus();
    }
  }

  /** Tell about a block, and highlight its owners. */
  tell(number) {
    this.told = number;
    this.view.light(number === null ? [] : this.state.blocks[number].owners);
    if (number === null) {
      byId("pool-detail").replaceChildren();
    } else {
      this.describe(number);
    }
  }

  describe(number) {
    const { owners, cached } = this.state.blocks[number];
    const parts = [`Block ${number}`];
    owners.forEach((id, i) => {
      const place = this.state.requests.get(id)?.blockTable.indexOf(number) ?? -1;
      parts.push(
        i === 0 ? " is owned by " : ", ",
        { id, ...nameOf(this.state, id) },
        place < 0 ? "" : ` (its no. ${place + 1})`,
      );
    });
    if (owners.length === 0) {
      const last = cached && this.state.names.get(this.state.blocks[number].last);
      parts.push(" is free.");
      if (cached) {
        parts.push(
          ...(last ? [" It holds what ", last, " has computed."] : []),
          " A request that begins alike can take it over.",
        );
      }
    } else {
      parts.push(cached ? ". It is full, and the prefix cache can find it." : ".");
    }
    say(byId("pool-detail"), parts);
  }
}

function labelFor(names) {
  return names.length > 1 ? `${names.length}×` : (names[0]?.label ?? "");
}

function numberOf(target) {
  const number = target.closest("[data-block]")?.dataset.block;
  return number === undefined ? null : Number(number);
}
