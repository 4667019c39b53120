// The table of workers, those in trouble first.

import { h, named, setText, visible } from "./dom.js";
import { Curve, drawState, drawTiers, legend, stateName, tierBar, tierWords, TIERS } from "./figures.js";
import { count, counted, duration, percent, rate, timeElement } from "./format.js";
import { Rows } from "./rows.js";
import { get, set } from "./state.js";

const COLUMNS = ["Worker", "State", "Heard", "Pages", "Pages stored per second", "Pages removed per second", "Resyncs", "Digests agreed"];

/** The address of a worker's own view. */
export const chosen = (worker) => ({
  worker: worker.worker, model: worker.model, tenant: worker.tenant, block_size: worker.block_size,
});

/** A listener of clicks that opens the view of a worker, unless another tab is asked for. newest: returns the worker. */
const opens = (newest) => (event) => {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  event.stopPropagation();
  set(chosen(newest()));
  scrollTo(0, 0);
};

function row() {
  const name = h("a", { class: "name" });
  const model = h("span", { class: "sub" });
  const state = h("span");
  const why = h("span", { class: "sub" });
  const heard = h("td", { class: "number", "data-label": COLUMNS[2] });
  const bar = tierBar();
  const pages = h("span", { class: "sub" });
  const stays = h("span", { class: "sub" });
  const stored = new Curve("stored", "Pages stored");
  const storedRate = h("span", { class: "rate" });
  const removed = new Curve("removed", "Pages removed");
  const removedRate = h("span", { class: "rate" });
  const resyncs = h("td", { class: "number", "data-label": COLUMNS[6] });
  const agreed = h("td", { class: "number", "data-label": COLUMNS[7] });
  let newest = null;
  name.addEventListener("click", opens(() => newest));
  const element = h("tr", { onclick: opens(() => newest) },
    h("td", { class: "wide first", "data-label": COLUMNS[0] }, name, model),
    h("td", { "data-label": COLUMNS[1] }, state, why),
    heard,
    h("td", { class: "wide", "data-label": COLUMNS[3] }, bar, pages, stays),
    h("td", { "data-label": COLUMNS[4] }, stored.element, storedRate),
    h("td", { "data-label": COLUMNS[5] }, removed.element, removedRate),
    resyncs, agreed);
  const update = (worker, whole, now) => {
    newest = worker;
    setText(name, named(worker.worker));
    name.title = visible(named(worker.worker));
    name.href = `?${new URLSearchParams(chosen(worker))}`;
    const ranks = worker.ranks.filter((rank) => !rank.group).length;
    const tenant = worker.tenant === "default" ? "" : `tenant ${named(worker.tenant)} · `;
    setText(model, `${named(worker.model)} · ${tenant}${worker.block_size} tokens a page${ranks > 1 ? ` · ${ranks} ranks` : ""}`);
    drawState(state, worker.state, worker.reason);
    drawWhy(why, worker);
    setText(heard, `${duration(worker.age_s)} ago`);
    const room = roomOf(worker);
    drawTiers(bar, room.parts, room.whole ?? whole, `${named(worker.worker)}: ${room.words}`);
    bar.classList.toggle("unknown", room.whole === null);
    setText(pages, [room.short, bookedWords(worker)].filter((each) => each).join(" · "));
    const stay = worker.lifetime_p50_s ?? worker.lifetime_s;
    setText(stays, stay === null ? "" : `a page stays ${duration(stay)}${worker.lifetime_p50_s === null ? " on average" : " (median)"}`);
    stored.draw(worker.stored);
    setText(storedRate, rate(worker.stored.at(-1) ?? 0));
    removed.draw(worker.removed);
    setText(removedRate, rate(worker.removed.at(-1) ?? 0));
    setText(resyncs, count(worker.resyncs));
    setText(agreed, worker.agreed_at === null ? "not yet" : `${duration(now - worker.agreed_at)} ago`);
  };
  return { element, update };
}

/** What a worker holds of its room: pages by tier, pages of the full bar or null if its room is unknown, and words. */
export function roomOf(worker) {
  const parts = TIERS.map((tier) => worker.pages[tier.medium] ?? 0);
  const held = parts.reduce((sum, each) => sum + each, 0);
  const rooms = TIERS.map((tier, i) => worker.capacity[tier.medium] ?? (parts[i] ? null : 0));
  const whole = rooms.includes(null) || rooms.every((each) => each === 0) ? null : rooms.reduce((sum, each) => sum + each, 0);
  const on = (tier, i) => `${count(parts[i])} of ${counted(rooms[i], "page")} on ${tier.word}`;
  const words = whole === null ? tierWords(parts) : TIERS.map(on).filter((_, i) => rooms[i]).join(", ");
  const share = whole === null ? "" : ` of ${count(whole)} (${percent(held / whole)})`;
  return { parts, whole, words, short: `${whole === null ? counted(held, "page") : count(held)}${share}`, share: whole === null ? null : held / whole };
}

/** What is reserved on a worker, or "". */
export function bookedWords({ booked }) {
  if (!booked.requests) return "";
  return `${counted(booked.requests, "request")} booked: ${counted(booked.prefill_tokens, "token")} to compute, ${counted(booked.decode_pages, "page")}`;
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

const COMPACT_FROM = 30;
const held = (worker) => TIERS.reduce((sum, tier) => sum + (worker.pages[tier.medium] ?? 0), 0);
const last = (numbers) => numbers.at(-1) ?? 0;
const ORDERS = { // "": as the service sends them
  "": { title: "those in trouble first" },
  name: { title: "by name" },
  full: { title: "the fullest first", key: (worker) => roomOf(worker).share ?? -1 },
  held: { title: "most pages first", key: held },
  removed: { title: "most pages removed per second first", key: (worker) => last(worker.removed) },
  resyncs: { title: "most resyncs first", key: (worker) => worker.resyncs },
};
const byName = new Intl.Collator("en", { numeric: true });

/** A worker in a few words, for large fleets. */
function tile() {
  const name = h("bdi");
  const state = h("span");
  const bar = tierBar();
  const pages = h("span", { class: "sub" });
  let newest = null;
  const element = h("a", { class: "tile", onclick: opens(() => newest) }, h("span", { class: "line" }, h("span", { class: "name" }, name), state), bar, pages);
  const update = (worker, whole) => {
    newest = worker;
    const room = roomOf(worker);
    element.href = `?${new URLSearchParams(chosen(worker))}`;
    element.title = visible(`${named(worker.worker)}: ${worker.state}${worker.cause ? `. ${troubleWords(worker)}` : ""}`);
    setText(name, named(worker.worker));
    drawState(state, worker.state, worker.reason);
    drawTiers(bar, room.parts, room.whole ?? whole, `${named(worker.worker)}: ${room.words}`);
    bar.classList.toggle("unknown", room.whole === null);
    setText(pages, room.short);
  };
  return { element, update };
}

export class Workers {
  #count = h("p");
  #filter = h("input", { type: "search", placeholder: "part of a name", "aria-label": "Show workers whose names contain" });
  #order = h("select", { "aria-label": "Order" }, Object.entries(ORDERS).map(([name, { title }]) => h("option", { value: name }, title)));
  #totals = h("dl", { class: "facts card pad" });
  #body = h("tbody");
  #grid = h("div", { class: "tiles", hidden: true });
  #table;
  #empty = h("div", { class: "empty", hidden: true });
  #whole = 1;
  #now = 0;

  constructor(section, refresh) {
    this.#filter.addEventListener("input", refresh);
    this.#order.addEventListener("change", () => set({ order: this.#order.value }, { push: false }));
    this.#table = h("table", { class: "workers cards" },
      h("thead", {}, h("tr", {}, COLUMNS.map((name, i) => h("th", { scope: "col", class: [2, 6, 7].includes(i) ? "number" : null }, name)))),
      this.#body);
    section.append(
      h("header", {}, h("h2", { id: "workers-title" }, "Workers"), this.#count, h("span", { class: "push" }, legend()),
        this.#order, h("label", {}, "Filter", this.#filter)),
      this.#totals, h("div", { class: "card" }, this.#table, this.#grid, this.#empty));
    const rows = (parent, make) => new Rows(parent, (worker) => JSON.stringify(chosen(worker)), () => {
      const { element, update } = make();
      return { element, update: (each) => update(each, this.#whole, this.#now) };
    });
    this.rows = rows(this.#body, row);
    this.tiles = rows(this.#grid, tile);
  }

  /** Part of a name that selects workers. */
  get contains() {
    return this.#filter.value.trim();
  }

  show(fleet) {
    this.#whole = Math.max(1, ...fleet.workers.map((worker) => worker.peak_pages));
    this.#now = fleet.time;
    const shown = fleet.workers.length;
    const words = Object.entries(fleet.states).map(([state, number]) => `${count(number)} ${state}`).join(", ");
    setText(this.#count, !fleet.num_workers ? "" : shown < fleet.num_selected
      ? `${words}; the ${count(shown)} with most trouble of ${count(fleet.num_selected)} are shown, the filter finds others` : words);
    const isCompact = shown >= COMPACT_FROM;
    this.#table.hidden = shown === 0 || isCompact;
    this.#grid.hidden = !isCompact;
    this.#empty.hidden = shown > 0;
    if (!shown) {
      this.#empty.replaceChildren(...(fleet.num_workers
        ? ["No worker's name contains this text."]
        : fleet.verdict.join("").split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part))));
    }
    this.#showTotals(fleet);
    const workers = this.#sorted(fleet.workers);
    this.rows.show(isCompact ? [] : workers);
    this.tiles.show(isCompact ? workers : []);
  }

  #sorted(workers) {
    const order = ORDERS[get("order") ?? ""] ? get("order") ?? "" : "";
    if (document.activeElement !== this.#order) this.#order.value = order;
    this.#order.hidden = workers.length < 2;
    if (order === "") return workers;
    const key = ORDERS[order].key ?? (() => 0);
    return [...workers].sort((a, b) => key(b) - key(a) || byName.compare(a.worker, b.worker));
  }

  #showTotals(fleet) {
    const sum = (number) => fleet.workers.reduce((total, worker) => total + number(worker), 0);
    const rooms = fleet.workers.map((worker) => roomOf(worker).whole);
    const room = rooms.includes(null) ? null : rooms.reduce((total, each) => total + each, 0);
    const pages = sum(held);
    const totals = {
      Workers: count(fleet.num_selected), "Pages held": count(pages),
      "Room for": room === null ? "not known" : `${count(room)} pages (${percent(pages / room)} full)`,
      "Copies of others": percent(fleet.duplicated),
      "Stored per second": rate(sum((worker) => last(worker.stored))), "Removed per second": rate(sum((worker) => last(worker.removed))),
    };
    this.#totals.hidden = fleet.workers.length < 2;
    this.#totals.replaceChildren(...Object.entries(totals).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  }
}
