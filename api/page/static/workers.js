// The table of workers, those in trouble first.

import { h, named, setText, visible } from "./dom.js";
import { Curve, drawState, drawTiers, legend, stateName, tierBar, tierWords, TIERS } from "./figures.js";
import { count, counted, duration, rate, timeElement } from "./format.js";
import { Rows } from "./rows.js";
import { set } from "./state.js";

const COLUMNS = ["Worker", "State", "Heard", "Pages", "Pages stored per second", "Pages removed per second", "Resyncs", "Digests agreed"];

/** The address of a worker's own view. */
export const chosen = (worker) => ({
  worker: worker.worker, model: worker.model, tenant: worker.tenant, block_size: worker.block_size,
});

function row() {
  const name = h("a", { class: "name" });
  const model = h("span", { class: "sub" });
  const state = h("span");
  const why = h("span", { class: "sub" });
  const heard = h("td", { class: "number", "data-label": COLUMNS[2] });
  const bar = tierBar();
  const pages = h("span", { class: "sub" });
  const stored = new Curve("stored", "Pages stored");
  const storedRate = h("span", { class: "rate" });
  const removed = new Curve("removed", "Pages removed");
  const removedRate = h("span", { class: "rate" });
  const resyncs = h("td", { class: "number", "data-label": COLUMNS[6] });
  const agreed = h("td", { class: "number", "data-label": COLUMNS[7] });
  let newest = null;
  const open = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    event.stopPropagation();
    set(chosen(newest));
    scrollTo(0, 0);
  };
  name.addEventListener("click", open);
  const element = h("tr", { onclick: open },
    h("td", { class: "wide first", "data-label": COLUMNS[0] }, name, model),
    h("td", { "data-label": COLUMNS[1] }, state, why),
    heard,
    h("td", { class: "wide", "data-label": COLUMNS[3] }, bar, pages),
    h("td", { "data-label": COLUMNS[4] }, stored.element, storedRate),
    h("td", { "data-label": COLUMNS[5] }, removed.element, removedRate),
    resyncs, agreed);
  const update = (worker, whole, now) => {
    newest = worker;
    setText(name, named(worker.worker));
    name.href = `?${new URLSearchParams(chosen(worker))}`;
    const ranks = worker.ranks.filter((rank) => !rank.group).length;
    const tenant = worker.tenant === "default" ? "" : `tenant ${named(worker.tenant)} · `;
    setText(model, `${named(worker.model)} · ${tenant}${worker.block_size} tokens a page${ranks > 1 ? ` · ${ranks} ranks` : ""}`);
    drawState(state, worker.state, worker.reason);
    drawWhy(why, worker);
    setText(heard, `${duration(worker.age_s)} ago`);
    const parts = TIERS.map((tier) => worker.pages[tier.medium] ?? 0);
    const all = parts.reduce((sum, each) => sum + each, 0);
    drawTiers(bar, parts, whole, `${named(worker.worker)}: ${tierWords(parts)}`);
    setText(pages, all === worker.peak_pages ? counted(all, "page") : `${counted(all, "page")}, at most ${count(worker.peak_pages)}`);
    stored.draw(worker.stored);
    setText(storedRate, rate(worker.stored.at(-1) ?? 0));
    removed.draw(worker.removed);
    setText(removedRate, rate(worker.removed.at(-1) ?? 0));
    setText(resyncs, count(worker.resyncs));
    setText(agreed, worker.agreed_at === null ? "not yet" : `${duration(now - worker.agreed_at)} ago`);
  };
  return { element, update };
}

/** Why a worker is in its state, and since when. */
export function drawWhy(element, worker) {
  const text = JSON.stringify([worker.state, worker.reason, worker.cause, worker.since, worker.missing_batches, worker.is_resync_requested]);
  if (element.dataset.text === text) return;
  element.dataset.text = text;
  const name = stateName(worker.state, worker.reason);
  const words = [];
  if (name !== "live") {
    if (worker.reason && name !== "left") words.push(worker.cause || worker.reason);
    if (worker.missing_batches) words.push(`${counted(worker.missing_batches, "batch", "batches")} lost`);
    if (worker.is_resync_requested && name === "stale") words.push("resync asked for");
  }
  const since = worker.since === null || name === "live" ? [] : [words.length ? ", since " : "since ", timeElement(worker.since)];
  element.title = worker.cause ? visible(troubleWords(worker)) : "";
  element.replaceChildren(h("span", {}, words.join(", ")), ...since);
}

/** The address of a worker that is not live, the cause, and what to do. */
export function troubleWords({ endpoint, cause, remedy }) {
  const where = endpoint && !cause.includes(endpoint) ? `${endpoint}: ` : "";
  return `${where}${cause}. ${remedy}`.trim();
}

export class Workers {
  #count = h("p");
  #filter = h("input", { type: "search", placeholder: "part of a name", "aria-label": "Show workers whose names contain" });
  #body = h("tbody");
  #table;
  #empty = h("div", { class: "empty", hidden: true });
  #whole = 1;
  #now = 0;

  constructor(section, refresh) {
    this.#filter.addEventListener("input", refresh);
    this.#table = h("table", { class: "workers cards" },
      h("thead", {}, h("tr", {}, COLUMNS.map((name, i) => h("th", { scope: "col", class: [2, 6, 7].includes(i) ? "number" : null }, name)))),
      this.#body);
    section.append(
      h("header", {}, h("h2", { id: "workers-title" }, "Workers"), this.#count, h("span", { class: "push" }, legend()),
        h("label", {}, "Filter", this.#filter)),
      h("div", { class: "card" }, this.#table, this.#empty));
    this.rows = new Rows(this.#body, (worker) => JSON.stringify(chosen(worker)), (worker) => {
      const { element, update } = row(worker);
      return { element, update: (each) => update(each, this.#whole, this.#now) };
    });
  }

  /** Part of a name that selects workers. */
  get contains() {
    return this.#filter.value.trim();
  }

  show(fleet) {
    this.#whole = Math.max(1, ...fleet.workers.map((worker) => Math.max(worker.peak_pages, ...[TIERS.reduce((sum, tier) => sum + (worker.pages[tier.medium] ?? 0), 0)])));
    this.#now = fleet.time;
    const shown = fleet.workers.length;
    const words = Object.entries(fleet.states).map(([state, number]) => `${count(number)} ${state}`).join(", ");
    setText(this.#count, !fleet.num_workers ? "" : shown < fleet.num_selected
      ? `${words}; the ${count(shown)} with most trouble of ${count(fleet.num_selected)} are shown, the filter finds others`
      : `${words}; those in trouble first`);
    this.#table.hidden = shown === 0;
    this.#empty.hidden = shown > 0;
    if (!shown) {
      this.#empty.replaceChildren(...(fleet.num_workers
        ? ["No worker's name contains this text."]
        : fleet.verdict.join("").split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part))));
    }
    this.rows.show(fleet.workers);
  }
}
