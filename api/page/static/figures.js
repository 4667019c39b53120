// What several sections draw: tiers as bars, curves, states, the legend.

import { h, setText, svg, visible } from "./dom.js";
import { count, counted, minuteOf, rate } from "./format.js";

/** Tiers, fastest first: class, medium in events, field in answers, word. */
export const TIERS = [
  { name: "gpu", medium: "GPU", word: "GPU" },
  { name: "cpu", medium: "CPU_PINNED", word: "CPU" },
  { name: "disk", medium: "DISK", word: "Disk" },
  { name: "external", medium: "EXTERNAL", word: "External" },
];

const SYMBOLS = { live: "●", syncing: "◐", stale: "▲", expired: "✕", left: "○" };

/** The legend of the tiers, in words. */
export const legend = () => h("ul", { class: "legend", "aria-label": "Tiers" },
  TIERS.map((tier) => h("li", {}, h("span", { class: `swatch ${tier.name}` }), tier.word)),
  h("li", {}, h("span", { class: "swatch none" }), "not held"));

/** A bar of four parts. */
export const tierBar = (size = "") => h("div", { class: `tiers ${size}`, role: "img" });

/** Draw pages by tier into a bar. parts: pages on each tier; whole: pages of the whole bar. */
export function drawTiers(bar, parts, whole, label) {
  const drawn = `${parts} ${whole}`;
  if (bar.dataset.drawn !== drawn) {
    bar.dataset.drawn = drawn;
    bar.replaceChildren(...parts.flatMap((pages, tier) => {
      if (!pages || !whole) return [];
      const part = h("span", { class: TIERS[tier].name });
      part.style.width = `${(100 * pages) / whole}%`;
      return [part];
    }));
  }
  const shown = visible(label);
  if (bar.title !== shown) {
    bar.title = shown;
    bar.setAttribute("aria-label", shown);
  }
}

/** "41,200 pages on GPU, 12 on CPU", or "no pages". parts: on each tier. */
export function tierWords(parts, noun = "page") {
  const held = parts.map((pages, tier) => [pages, TIERS[tier].word]).filter(([pages]) => pages);
  if (!held.length) return `no ${noun}s`;
  return held.map(([pages, word], first) => `${first ? count(pages) : counted(pages, noun)} on ${word}`).join(", ");
}

/** Cumulative counts (on a tier or a faster one) -> counts on each tier alone. */
export const alone = (cumulative) => cumulative.map((pages, tier) => pages - (tier ? cumulative[tier - 1] : 0));

/** The name of a worker's state, in which a closed publisher is not a fault. */
export const stateName = (state, reason) => (reason === "closed" ? "left" : state);

/** Show a state as a symbol and a word. */
export function drawState(element, state, reason) {
  const name = stateName(state, reason);
  if (element.dataset.state === name) return;
  element.dataset.state = name;
  element.className = `state ${name}`;
  element.replaceChildren(h("span", { class: "symbol", "aria-hidden": "true" }, SYMBOLS[name] ?? "?"), name);
}

const LEAST_INTERVALS = 24; // a curve grows from the right until there are as many

/** A curve over time; `draw` shows numbers in it. */
export class Curve {
  constructor(kind, label) {
    this.label = label;
    this.area = svg("polygon", { class: "area" });
    this.line = svg("polyline", { class: "line" });
    this.title = svg("title");
    this.element = svg("svg", { class: `curve ${kind}`, viewBox: "0 0 100 26", preserveAspectRatio: "none", role: "img" },
      this.title, svg("line", { class: "base", x1: 0, x2: 100, y1: 25.5, y2: 25.5 }), this.area, this.line);
  }

  draw(numbers, most = Math.max(...numbers, 0)) {
    const step = 100 / (Math.max(LEAST_INTERVALS, numbers.length) - 1);
    const first = 100 - step * (numbers.length - 1);
    const points = numbers.map((number, i) => `${(first + i * step).toFixed(1)},${(25 - (22 * number) / (most || 1)).toFixed(1)}`);
    this.line.setAttribute("points", points.join(" "));
    this.area.setAttribute("points", points.length ? `${first.toFixed(1)},25.5 ${points.join(" ")} 100,25.5` : "");
    setText(this.title, `${this.label}: now ${rate(numbers.at(-1) ?? 0)} per second, at most ${rate(most)} in the time shown`);
  }
}

const PLOT_TICKS = 4;

/** A curve with axes: numbers at the left, times below. Steps without a number are gaps. */
export class Plot {
  /** words: number -> text. */
  constructor(label, words, kind = "") {
    this.words = words;
    this.line = svg("path", { class: "line" });
    this.title = svg("title", {}, label);
    this.label = label;
    this.heights = h("div", { class: "heights", "aria-hidden": "true" });
    this.times = h("div", { class: "times", "aria-hidden": "true" });
    const grid = [0, 25, 50, 75, 100].map((y) => svg("line", { class: "grid", x1: 0, x2: 100, y1: y, y2: y }));
    const drawing = svg("svg", { class: `curve ${kind}`, viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img" }, this.title, grid, this.line);
    this.element = h("div", { class: "plot" }, this.heights, drawing, this.times);
  }

  /** numbers: one for each step, or null. until: end of the last step, seconds since 1970. most: at the upper end. */
  draw(numbers, until, stepS, most = Math.max(...numbers, 0)) {
    const width = 100 / Math.max(1, numbers.length);
    let isDrawing = false;
    const parts = numbers.map((number, i) => {
      const [x, y] = [((i + 0.5) * width).toFixed(2), (100 - (100 * (number ?? 0)) / (most || 1)).toFixed(2)];
      const alone = number !== null && !isDrawing && (numbers[i + 1] ?? null) === null ? `h${(width / 4).toFixed(2)}` : "";
      const part = number === null ? "" : `${isDrawing ? "L" : "M"}${x},${y}${alone}`;
      isDrawing = number !== null;
      return part;
    });
    this.line.setAttribute("d", parts.join(""));
    this.heights.replaceChildren(...[1, 0.5, 0].map((part) => h("span", {}, this.words(part * most))));
    const from = until - numbers.length * stepS;
    this.times.replaceChildren(...Array.from({ length: PLOT_TICKS + 1 }, (_, i) => h("span", {}, minuteOf(from + ((until - from) * i) / PLOT_TICKS))));
    const known = numbers.filter((number) => number !== null);
    setText(this.title, known.length ? `${this.label}: at last ${this.words(known.at(-1))}, between ${this.words(Math.min(...known))} and ${this.words(Math.max(...known))}` : `${this.label}: no numbers`);
  }
}
