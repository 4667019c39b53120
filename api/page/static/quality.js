// Routing quality: the hit rate over time, tokens saved, and losses by cause and worker with an example of each.

import { getJson } from "./api.js";
import { h, named, setText } from "./dom.js";
import { Plot } from "./figures.js";
import { count, counted, percent, timeElement } from "./format.js";
import { get, set } from "./state.js";

const RANGES = [[3600, "Last hour"], [21600, "Last 6 hours"], [86400, "Last 24 hours"], [172800, "Last 2 days"]];
const HOUR_S = 3600;
const NOW_S = 300; // at least one step
const CAUSES = {
  choice: "another candidate held more",
  engine: "the engine delivered less than predicted",
};
const COLUMNS = ["Tokens lost", "Cause", "Chosen worker", "Requests", "Example"];

const total = (steps, field) => steps.reduce((sum, step) => sum + step[field], 0);
const rateOf = (steps, field) => (total(steps, "prompt_tokens") ? total(steps, field) / total(steps, "prompt_tokens") : null);

export class Quality {
  #section;
  #explain;
  #range = h("select", { "aria-label": "Time range" }, RANGES.map(([seconds, name]) => h("option", { value: seconds }, name)));
  #count = h("p");
  #facts = h("dl", { class: "facts" });
  #plot = new Plot("Hit rate", percent);
  #rows = h("tbody");
  #losses;

  /** explain: function of the body of a request to /explain, as text, and of what it is about. */
  constructor(section, explain) {
    this.#section = section;
    this.#explain = explain;
    this.#range.addEventListener("change", () => set({ range: this.#range.value === "3600" ? null : this.#range.value }, { push: false }));
    this.#losses = h("div", { class: "card scroll", tabindex: 0, role: "region", "aria-label": "Losses" }, h("table", { class: "cards" },
      h("thead", {}, h("tr", {}, COLUMNS.map((name, i) => h("th", { scope: "col", class: i === 0 || i === 3 ? "number" : null }, name)))), this.#rows));
    section.append(
      h("header", {}, h("h2", { id: "quality-title" }, "Routing quality"), this.#count, h("span", { class: "push" }, this.#range)),
      h("div", { class: "card pad" }, this.#facts, this.#plot.element), this.#losses);
  }

  async refresh() {
    const range = RANGES.some(([seconds]) => String(seconds) === get("range")) ? get("range") : "3600";
    this.#range.value = range;
    this.#range.hidden = get("at") !== null; // a moment of the past has the hour before it
    const { time, finished, curve, step_s, lost, losses, decisions } = await getJson("funnel", { range_s: range });
    const field = finished.requests ? "cached_tokens" : "predicted_tokens";
    const word = finished.requests ? "of prompt tokens were in the engines' caches" : "of prompt tokens were predicted to be cached; outcomes are not reported";
    const isEmpty = !total(curve, "requests");
    this.#section.dataset.empty = isEmpty;
    if (isEmpty) return;
    setText(this.#count, `${counted(total(curve, "requests"), "request")}: how many ${word}`);
    const recent = Math.max(1, Math.round(NOW_S / step_s));
    const now = rateOf(curve.slice(-recent), field);
    const back = Math.max(0, curve.length - Math.ceil(HOUR_S / step_s));
    const before = rateOf(curve.slice(back, back + recent), field);
    const hasCandidates = decisions.some((each) => each.best_tokens !== null) || total(curve, "best_tokens") > total(curve, "predicted_tokens");
    const facts = {
      "Hit rate now": now === null ? "no request" : percent(now),
      "An hour ago": before === null ? "no request" : percent(before),
      "In the time shown": percent(rateOf(curve, field) ?? 0),
      "Tokens saved": count(total(curve, field)),
      "Lost by choice (1h)": count(lost.choice ?? 0),
      "Lost in engines (1h)": finished.requests ? count(lost.engine ?? 0) : "not reported",
      ...(hasCandidates ? { "Held by nobody": count(Math.max(0, total(curve, "prompt_tokens") - total(curve, "best_tokens"))) } : {}),
    };
    this.#facts.replaceChildren(...Object.entries(facts).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    this.#plot.draw(curve.map((step) => rateOf([step], field)), time, step_s, 1);
    this.#losses.hidden = !losses.length;
    this.#rows.replaceChildren(...losses.map((loss) => this.#row(loss)));
  }

  #row(loss) {
    const { example } = loss;
    const about = `Request ${named(example.request_id)}: ${CAUSES[loss.cause] ?? loss.cause}. What ${named(loss.worker)} held:`;
    const cells = [count(loss.tokens), CAUSES[loss.cause] ?? loss.cause, h("span", { class: "name" }, named(loss.worker)), count(loss.requests),
      [timeElement(example.time), " ", loss.explain ? h("a", { href: "#ask", onclick: () => this.#explain(loss.explain, about) }, "explain") : ""]];
    return h("tr", {}, cells.map((cell, i) => h("td", { "data-label": COLUMNS[i], class: i === 0 || i === 3 ? "number" : null }, cell)));
  }
}
