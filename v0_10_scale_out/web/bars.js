/**
 * The drawing of the timeline's bars on a canvas.
 *
 * A bar is split by request: decodes at the bottom (solid), drafts behind them (hollow; those that were right are half
 * filled), prompts above (striped). Heights grow with the square root of the tokens, unless the scale is linear: one
 * token of a budget of 512 would not be seen. Below each bar is the step's duration.
 * What this leaves out: what happens on a click (`timeline.js`).
 */

const LEFT = 38; // room for the scale's numbers
const TOP = 20; // room for the marks
const DURATION = 26;
const BOTTOM = 18; // room for the steps' numbers
const GAP = 14;

/** Where everything is: which steps are in sight, and what is at a point. */
export function layoutOf(steps, right, barWidth, width, height, isLinear) {
  const capacity = Math.max(1, Math.floor((width - LEFT - 2) / barWidth));
  const first = Math.max(0, right - capacity + 1);
  const visible = steps.slice(first, right + 1);
  const barHeight = height - TOP - GAP - DURATION - BOTTOM;
  const budget = Math.max(1, ...visible.map((step) => step.budget));
  const share = (tokens) => (isLinear ? tokens / budget : Math.sqrt(tokens / budget));
  const base = TOP + barHeight;
  const stepAt = (x) => visible[Math.floor((x - LEFT) / barWidth)] ?? null;
  const layout = {
    first,
    last: right,
    visible,
    capacity,
    barWidth,
    width,
    height,
    barHeight,
    base,
    budget,
    share,
    stepAt,
  };
  layout.partsOf = (step) => partsOf(step, layout);
  layout.partAt = (x, y) => {
    const step = x < LEFT ? null : stepAt(x);
    const part = step && partsOf(step, layout).find((other) => y <= other.bottom && y >= other.top);
    return step ? { step: step.number, id: part?.id ?? null } : null;
  };
  return layout;
}

/** The pieces of a bar from the bottom to the top: {id, label, colour, kind, top, bottom}. */
function partsOf(step, { base, barHeight, share }) {
  const perToken = step.numScheduled > 0 ? (barHeight * share(step.numScheduled)) / step.numScheduled : 0;
  const parts = [];
  let bottom = base;
  const add = (part, kind, tokens) => {
    if (tokens > 0) {
      parts.push({
        id: part.id,
        label: part.label,
        colour: part.colour,
        kind,
        bottom,
        top: bottom - tokens * perToken,
      });
      bottom -= tokens * perToken;
    }
  };
  for (const part of step.scheduled) {
    if (part.isDecode) {
      const numRight = part.round?.accepted ?? 0;
      add(part, "decode", part.tokens - part.drafts);
      add(part, "right", numRight);
      add(part, "draft", part.drafts - numRight);
    }
  }
  for (const part of step.scheduled) {
    if (!part.isDecode) {
      add(part, "prefill", part.tokens);
    }
  }
  return parts;
}

/** Draw everything anew: at most a few thousand rectangles. */
export function drawBars(canvas, layout, colours, { chosen, isFixed, hover, lit }) {
  const { width, height, visible, barWidth, base } = layout;
  const scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = `11px ${colours.font}`;
  drawScale(context, layout, colours);
  const slowest = Math.max(1e-9, ...visible.map((step) => step.seconds.all));
  visible.forEach((step, i) => {
    const x = LEFT + i * barWidth;
    const isChosen = step.number === chosen;
    if (isChosen || step.number === hover?.step) {
      context.fillStyle = colours.accent;
      context.globalAlpha = isChosen && isFixed ? 0.28 : 0.12;
      context.fillRect(x, 0, barWidth, height);
      context.globalAlpha = 1;
    }
    drawBar(context, layout, step, x, colours, lit);
    drawMarks(context, step, x + barWidth / 2, barWidth, colours);
    const long = (step.seconds.all / slowest) * DURATION;
    context.fillStyle = colours.dim;
    context.globalAlpha = 0.5;
    context.fillRect(x + 1, base + GAP + DURATION - long, barWidth - 2, long);
    context.globalAlpha = 1;
    drawNumber(context, step, x + barWidth / 2, layout, colours);
  });
  context.textAlign = "right";
  context.fillStyle = colours.dim;
  if (visible.length > 0) {
    const text = slowest < 0.01 ? (slowest * 1000).toFixed(1) : (slowest * 1000).toFixed(0);
    context.fillText(text, LEFT - 6, base + GAP + 9);
    context.fillText("ms", LEFT - 6, base + GAP + DURATION);
  }
}

function drawScale(context, { visible, width, budget, share, base, barHeight }, colours) {
  context.textAlign = "right";
  context.lineWidth = 1;
  if (visible.length === 0) {
    return;
  }
  const ticks = [budget, budget / 2, budget / 8, budget / 32].map(Math.round).filter((tick) => tick > 0);
  let above = -Infinity;
  for (const tick of ticks) {
    const y = Math.round(base - share(tick) * barHeight) + 0.5;
    if (y - above < 13 || base - y < 8) {
      continue;
    }
    above = y;
    context.strokeStyle = colours.line;
    context.beginPath();
    context.moveTo(LEFT, y);
    context.lineTo(width, y);
    context.stroke();
    context.fillStyle = colours.dim;
    context.fillText(String(tick), LEFT - 6, y + 4);
  }
  context.beginPath();
  context.moveTo(LEFT, base + 0.5);
  context.lineTo(width, base + 0.5);
  context.stroke();
}

function drawBar(context, layout, step, x, colours, lit) {
  const [left, width] = [x + 1, layout.barWidth - 2];
  for (const part of layout.partsOf(step)) {
    const high = part.bottom - part.top;
    const inner = Math.max(high - (high > 3 ? 1 : 0), 0.75);
    const colour = colours.colours[part.colour];
    const isFaint = lit.size > 0 && !lit.has(part.id);
    context.fillStyle = colour;
    const alphas = { decode: 1, right: 0.55, draft: 0.15, prefill: 0.32 };
    context.globalAlpha = alphas[part.kind] * (isFaint ? 0.3 : 1);
    context.fillRect(left, part.bottom - inner, width, inner);
    context.globalAlpha = isFaint ? 0.3 : 1;
    if (part.kind === "prefill") {
      drawStripes(context, left, part.bottom - inner, width, inner, colour);
    } else if (part.kind !== "decode" && high > 3) {
      context.strokeStyle = colour;
      context.strokeRect(left + 0.5, part.bottom - inner + 0.5, width - 1, inner - 1);
    }
    if (high >= 12 && width >= 9 * part.label.length) {
      context.textAlign = "center";
      context.fillStyle = part.kind === "decode" ? colours["on-colour"] : colours.ink;
      context.fillText(part.label, left + width / 2, part.bottom - high / 2 + 4);
    }
    context.globalAlpha = 1;
  }
}

function drawStripes(context, left, top, width, height, colour) {
  if (height < 4) {
    return;
  }
  context.save();
  context.beginPath();
  context.rect(left, top, width, height);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1.2;
  context.beginPath();
  for (let y = Math.floor(top / 5) * 5; y < top + height + width; y += 5) {
    context.moveTo(left, y);
    context.lineTo(left + width, y - width);
  }
  context.stroke();
  context.restore();
}

function drawMarks(context, step, middle, barWidth, colours) {
  context.textAlign = "center";
  if (step.preempted.length > 0) {
    const half = Math.min(5, barWidth / 2);
    context.fillStyle = colours.alarm;
    context.beginPath();
    context.moveTo(middle - half, 5);
    context.lineTo(middle + half, 5);
    context.lineTo(middle, 5 + half * 1.6);
    context.fill();
  } else if (step.refused) {
    context.strokeStyle = colours.dim;
    context.lineWidth = 1.2;
    context.beginPath();
    context.arc(middle, 9, Math.min(3, barWidth / 2 - 1), 0, 2 * Math.PI);
    context.stroke();
  }
}

function drawNumber(context, step, middle, { barWidth, height, width }, colours) {
  const every = Math.max(1, 10 ** Math.ceil(Math.log10(44 / barWidth)));
  const text = String(step.number);
  if (step.number % every === 0 && middle + 4 * text.length < width) {
    context.textAlign = "center";
    context.fillStyle = colours.dim;
    context.fillText(text, middle, height - 4);
  }
}
