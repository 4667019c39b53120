// One worker: what it holds, its timeline, its hottest prefixes, its last batches.

import { events, getJson, postJson } from "./api.js";
import { h, named, place, setText } from "./dom.js";
import { alone, drawState, drawTiers, legend, Plot, tierBar, tierWords, TIERS } from "./figures.js";
import { count, counted, duration, localTime, rate, timeElement } from "./format.js";
import { get, set } from "./state.js";
import { bookedWords, drawWhy, roomOf, troubleWords } from "./workers.js";

const MAX_BATCHES = 50;

/** Why no prefix of a worker is shown. */
function noPrefix(worker) {
  const pages = TIERS.reduce((sum, tier) => sum + (worker.pages[tier.medium] ?? 0), 0);
  return pages ? `It holds ${counted(pages, "page")}, but none of the prefixes that the map shows, those shared most.` : "It holds no page.";
}

export class WorkerView {
  #section;
  #shown = "";
  #parts = null;
  #abort = null;
  #newest = null;

  constructor(section) {
    this.#section = section;
  }

  /** The worker in the address, or null. */
  get chosen() {
    const worker = get("worker");
    return worker === null ? null : { worker, model: get("model"), tenant: get("tenant"), block_size: get("block_size") };
  }

  /** Show or hide the view, as the address says. */
  route() {
    const chosen = this.chosen;
    const wanted = chosen === null ? "" : JSON.stringify([chosen, get("at") === null]);
    if (wanted === this.#shown) return;
    this.#shown = wanted;
    this.#abort?.abort();
    this.#section.hidden = chosen === null;
    this.#section.replaceChildren();
    this.#parts = null;
    if (chosen !== null) this.#build(chosen);
  }

  #build(chosen) {
    const parts = this.#parts = {
      state: h("span"), why: h("span", { class: "quiet" }), trouble: h("p", { class: "why" }), facts: h("dl", { class: "facts" }), bar: tierBar("large"), pages: h("p", { class: "why" }),
      stored: new Plot("Pages stored per second", rate), storedWords: h("p", { class: "why" }),
      removed: new Plot("Pages removed per second", rate, "removed"), removedWords: h("p", { class: "why" }),
      ranks: h("tbody"), timeline: h("ol", { class: "timeline" }), prefixes: h("tbody"), batches: h("tbody"), said: h("span", { class: "quiet", role: "status" }),
    };
    parts.resync = h("button", { type: "button", onclick: () => this.#resync(chosen) }, "Ask for a resync");
    parts.forget = h("button", { type: "button", onclick: () => this.#forget() }, "Forget");
    const back = h("a", { href: "?", onclick: (event) => { event.preventDefault(); set({ worker: null, model: null, tenant: null, block_size: null }); } }, "← All workers");
    const table = (columns, body) => h("div", { class: "card scroll", tabindex: 0, role: "region", "aria-label": columns[0] },
      h("table", { class: "cards" }, h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col" }, name)))), body));
    this.#section.append(
      h("header", {}, back, h("h2", { id: "worker-title", class: "name" }, named(chosen.worker)), parts.state, parts.why,
        h("span", { class: "push" }, parts.said, " ", parts.resync, " ", parts.forget)),
      parts.trouble,
      h("div", { class: "card pad" }, parts.facts),
      h("header", {}, h("h3", {}, "Pages by tier"), h("span", { class: "push" }, legend())),
      h("div", { class: "card pad" }, parts.bar, parts.pages),
      h("div", { class: "pair" },
        h("div", {}, h("h3", {}, "Stored per second"), h("div", { class: "card pad" }, parts.stored.element, parts.storedWords)),
        h("div", {}, h("h3", {}, "Removed per second (evicted, cleared, not resent)"), h("div", { class: "card pad" }, parts.removed.element, parts.removedWords))),
      h("div", { class: "pair" },
        h("div", {}, h("h3", {}, "Timeline"), h("div", { class: "card" }, parts.timeline)),
        h("div", {}, h("h3", {}, "Last batches"), table(["Arrived", "Number", "Stored", "Removed", "Pages after it"], parts.batches))),
      h("h3", {}, "Hottest prefixes"), table(["Prefix", "Pages", "Held here", "By tier", "Holders"], parts.prefixes),
      h("h3", {}, "Ranks"), table(["Rank", "State", "Heard", "Batch", "Pages"], parts.ranks));
    if (get("at") === null) this.#follow(chosen);
  }

  /** Update from GET /fleet and GET /residency. */
  async refresh() {
    const chosen = this.chosen;
    const parts = this.#parts;
    if (chosen === null || parts === null) return;
    const fleet = await getJson("fleet", { worker: chosen.worker, limit: 100 });
    if (parts !== this.#parts) return;
    const worker = fleet.workers.find((each) => ["model", "tenant", "block_size"].every((name) => chosen[name] === null || String(each[name]) === chosen[name]));
    parts.resync.hidden = !worker?.can_resync;
    parts.forget.hidden = !worker?.can_forget;
    this.#newest = worker;
    setText(parts.trouble, worker?.cause ? troubleWords(worker) : "");
    if (worker === undefined) {
      setText(parts.why, "is not known now. It may have been forgotten, or not have joined yet.");
      parts.state.replaceChildren();
      return;
    }
    this.#show(worker, fleet);
    const shape = { model: worker.model, tenant: worker.tenant, block_size: worker.block_size };
    const map = await getJson("residency", { ...shape, worker: worker.worker, limit: 20 }).catch((error) => {
      if (error.status === 404) return null;
      throw error;
    });
    if (map !== null && parts === this.#parts) this.#showPrefixes(worker, map);
  }

  #show(worker, fleet) {
    const parts = this.#parts;
    drawState(parts.state, worker.state, worker.reason);
    drawWhy(parts.why, worker);
    const ago = (at) => (at === null ? "not yet" : `${duration(fleet.time - at)} ago`);
    const facts = {
      Model: named(worker.model), Tenant: named(worker.tenant), "Tokens per page": count(worker.block_size), "Last heard": `${duration(worker.age_s)} ago`,
      "Digests agreed": ago(worker.agreed_at), Batches: count(worker.batches), Resyncs: count(worker.resyncs), Gaps: count(worker.gaps), "Lost batches": count(worker.missing_batches), Restarts: count(worker.restarts), Reserved: bookedWords(worker) || "nothing",
    };
    parts.facts.replaceChildren(...Object.entries(facts).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    const room = roomOf(worker);
    drawTiers(parts.bar, room.parts, room.whole ?? worker.peak_pages, room.words);
    parts.bar.classList.toggle("unknown", room.whole === null);
    const sentences = [`${room.words}.`,
      room.whole === null ? `Its room is not known: the whole bar is the most that it held since this service knows it, ${counted(worker.peak_pages, "page")}.` : null,
      worker.lifetime_p50_s === null ? null : `Half of the pages that it removed stayed ${duration(worker.lifetime_p50_s)} at most on the device.`,
      worker.lifetime_s === null ? "No page was removed lately." : `A page stays ${duration(worker.lifetime_s)} on average before it is removed.`];
    setText(parts.pages, sentences.filter((each) => each).join(" "));
    const minutes = duration(worker.stored.length * fleet.interval_s);
    for (const name of ["stored", "removed"]) {
      const numbers = worker[name];
      parts[name].draw(numbers, fleet.time, fleet.interval_s);
      setText(parts[`${name}Words`], numbers.length ? `now ${rate(numbers.at(-1))}, at most ${rate(Math.max(...numbers))} pages per second in the last ${minutes}` : "not measured yet");
    }
    parts.timeline.replaceChildren(...(worker.changes.length ? worker.changes.map((change) => h("li", {}, timeElement(change.time),
      h("span", {}, worker.ranks.length > 1 ? `rank ${change.dp_rank}: ` : "", change.event, change.reason ? `: ${change.reason}` : "")))
      : [h("li", { class: "quiet" }, "No change of state since the service started.")]));
    parts.ranks.replaceChildren(...worker.ranks.map((rank) => {
      const state = h("span");
      drawState(state, rank.state, rank.reason);
      const pages = TIERS.map((tier) => rank.pages[tier.medium] ?? 0);
      return h("tr", {}, h("td", { "data-label": "Rank" }, `${rank.dp_rank}${rank.group ? ` (${rank.group})` : ""}`),
        h("td", { "data-label": "State" }, state, h("span", { class: "sub" }, rank.cause || rank.reason)), h("td", { "data-label": "Heard" }, `${duration(rank.age_s)} ago`),
        h("td", { "data-label": "Batch" }, count(rank.seq)), h("td", { "data-label": "Pages" }, tierWords(pages)));
    }));
  }

  #showPrefixes(worker, map) {
    const mine = map.columns.map((column) => column.worker === worker.worker);
    const rows = map.rows.map((row) => {
      const cells = row.cells.filter(([column]) => mine[column]).map(([, ...held]) => held);
      const best = cells.reduce((most, held) => (held[3] > most[3] ? held : most), [0, 0, 0, 0]);
      const bar = tierBar();
      const parts = alone(best);
      drawTiers(bar, parts, row.pages, tierWords(parts));
      return h("tr", {}, h("td", { "data-label": "Prefix" }, h("code", { title: `sequence hash ${row.hash}` }, row.hash.slice(0, 8))),
        h("td", { "data-label": "Pages" }, count(row.pages)), h("td", { "data-label": "Held here" }, counted(best[3], "page")),
        h("td", { "data-label": "By tier", class: "wide" }, bar), h("td", { "data-label": "Holders" }, count(row.holders)));
    });
    this.#parts.prefixes.replaceChildren(...(rows.length ? rows : [h("tr", {}, h("td", { colspan: 5, class: "quiet wide" }, noPrefix(worker)))]));
  }

  async #follow(chosen) {
    const { batches } = this.#parts;
    const waiting = h("tr", {}, h("td", { colspan: 5, class: "quiet wide" }, "Waiting for the next batch. Heartbeats come every two seconds."));
    batches.append(waiting);
    this.#abort = new AbortController();
    const { signal } = this.#abort;
    const sum = (counts) => Object.values(counts).reduce((all, each) => all + each, 0);
    const show = (batch) => {
      waiting.remove();
      const words = batch.cleared ? "all, then " : "";
      const rank = batch.dp_rank ? `rank ${batch.dp_rank}: ` : "";
      batches.prepend(h("tr", {}, h("td", { "data-label": "Arrived" }, timeElement(Date.now() / 1000)), h("td", { "data-label": "Number" }, `${rank}${count(batch.seq)}`),
        h("td", { "data-label": "Stored" }, counted(sum(batch.stored), "page")), h("td", { "data-label": "Removed" }, `${words}${counted(sum(batch.removed), "page")}`),
        h("td", { "data-label": "Pages after it" }, counted(sum(batch.pages), "page"))));
      while (batches.children.length > MAX_BATCHES) batches.lastChild.remove();
    };
    while (!signal.aborted) {
      try {
        await events({ worker: chosen.worker, model: chosen.model, tenant: chosen.tenant, kind: "batch" }, { batch: show }, signal);
      } catch (error) {
        if (signal.aborted) return;
        setText(waiting.firstChild, `Batches cannot be followed: ${error.message}. Trying again.`);
        if (!batches.children.length) batches.append(waiting);
      }
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }

  async #forget() {
    const { worker, model, tenant } = this.#newest;
    if (!confirm(`Forget ${worker} of ${model}? Its pages leave all answers.`)) return;
    try {
      await postJson("unregister", { instance_id: worker, model_name: model, routing_group: tenant });
      set({ worker: null, model: null, tenant: null, block_size: null });
    } catch (error) {
      setText(this.#parts.said, error.message);
    }
  }

  async #resync(chosen) {
    const { said } = this.#parts;
    try {
      const query = new URLSearchParams(Object.entries({ model: chosen.model, tenant: chosen.tenant }).filter(([, value]) => value !== null));
      const path = `workers/${chosen.worker.split("/").map(encodeURIComponent).join("/")}/resync?${query}`;
      const { streams } = await postJson(path, {});
      setText(said, `Asked ${counted(streams.length, "stream")} at ${localTime(Date.now() / 1000)}.`);
    } catch (error) {
      setText(said, error.message);
    }
  }
}
