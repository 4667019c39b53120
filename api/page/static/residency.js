// The map: the most shared prefixes against the workers, by tier and depth.

import { getJson } from "./api.js";
import { h, named, place, setText } from "./dom.js";
import { alone, drawTiers, legend, tierBar, tierWords } from "./figures.js";
import { count, counted } from "./format.js";
import { Rows } from "./rows.js";
import { get, set } from "./state.js";

const MAX_CELLS = 5000;

const titleOf = (space) => `${space.tenant === "default" ? "" : `${named(space.tenant)} / `}${named(space.model)}, ${space.block_size} tokens a page`;

/** Why a map has no rows. */
function whyEmpty(found) {
  const isPast = get("at") !== null;
  const space = found.namespaces.find((each) => ["model", "tenant", "block_size"].every((name) => each[name] === found[name]));
  if (space === undefined) return isPast ? "Nothing was held at this moment." : "Nothing is held yet. The map fills as workers report their pages.";
  if (space.pages) return `${counted(space.pages, "page")} of this model ${space.pages === 1 ? "is" : "are"} held, but none from the beginning of a prompt on.`;
  return isPast ? "No worker held a page of this model at this moment." : "No worker holds a page of this model yet. Send requests to its engines.";
}

/** ["10.0.0.1:8000", "10.0.0.2:8000"] -> ":8000", which would fill the narrow columns. */
function sharedEnd(names) {
  const ends = names.length > 1 ? [...names[0].matchAll(/:|\.(?=[a-z])/gi)].map(({ index }) => names[0].slice(index)) : [];
  return ends.find((end) => names.every((name) => name.endsWith(end) && name !== end)) ?? "";
}

export class ResidencyMap {
  #count = h("p");
  #choice = h("select", { "aria-label": "Model" });
  #head = h("tr");
  #body = h("tbody");
  #table;
  #empty = h("p", { class: "empty" });
  #columns = "";
  #limit = 100;
  #answer = null;

  constructor(section) {
    this.#choice.addEventListener("change", () => {
      const [model, tenant, block_size] = JSON.parse(this.#choice.value);
      set({ model, tenant, block_size }, { push: false });
      this.refresh();
    });
    this.#table = h("table", {}, h("thead", {}, this.#head), this.#body);
    section.append(
      h("header", {}, h("h2", { id: "residency-title" }, "Residency"), this.#count, h("span", { class: "push" }, legend()), this.#choice),
      h("div", { class: "card map", tabindex: 0, role: "region", "aria-label": "Map of prefixes and workers" }, this.#table, this.#empty));
    this.rows = new Rows(this.#body, (row) => row.hash, () => this.#row());
  }

  async refresh() {
    const wanted = { model: get("model"), tenant: get("tenant"), block_size: get("block_size") };
    const found = await getJson("residency", { ...wanted, limit: this.#limit }).catch((error) => {
      if (error.status === 404) return getJson("residency", { limit: this.#limit });
      throw error;
    });
    this.#answer = found;
    this.#limit = Math.max(20, Math.min(300, Math.floor(MAX_CELLS / Math.max(1, found.columns.length))));
    this.#showChoice(found);
    this.#showColumns(found);
    const isEmpty = !found.rows.length;
    this.#table.hidden = isEmpty;
    this.#empty.hidden = !isEmpty;
    setText(this.#empty, whyEmpty(found));
    const columns = found.num_columns > found.columns.length ? ` The ${found.columns.length} workers that hold most are shown.` : "";
    setText(this.#count, isEmpty ? "" : `${counted(found.rows.length, "prefix", "prefixes")}, those shared most first. Each cell: how much of the prefix a worker holds.${columns}`);
    this.rows.show(found.rows);
  }

  #showChoice(found) {
    const values = found.namespaces.map((space) => JSON.stringify([space.model, space.tenant, space.block_size]));
    const chosen = JSON.stringify([found.model, found.tenant, found.block_size]);
    if (this.#choice.dataset.values !== String(values)) {
      this.#choice.dataset.values = String(values);
      this.#choice.replaceChildren(...found.namespaces.map((space, i) => h("option", { value: values[i] }, titleOf(space))));
    }
    if (document.activeElement !== this.#choice) this.#choice.value = chosen;
    this.#choice.hidden = values.length < 2;
  }

  #showColumns(found) {
    const columns = JSON.stringify(found.columns);
    if (columns === this.#columns) return;
    this.#columns = columns;
    this.#table.style.setProperty("--columns", found.columns.length);
    const ranks = new Set(found.columns.map((column) => column.dp_rank)).size > 1;
    const names = found.columns.map((column) => (ranks ? `${named(column.worker)} / ${column.dp_rank}` : named(column.worker)));
    const cut = sharedEnd(names).length;
    place(this.#head, [
      h("th", { scope: "col" }, "Prefix"),
      ...found.columns.map(({ state }, i) => h("th", { scope: "col", title: `${names[i]}: ${state}` },
        h("bdi", {}, state === "live" ? "" : "▲ ", names[i].slice(0, names[i].length - cut)))),
    ]);
  }

  #row() {
    const label = h("th", { scope: "row" });
    const element = h("tr", {}, label);
    let cells = [];
    let shown = "";
    const fit = (columns) => {
      if (cells.length === columns.length) return;
      cells = columns.map(() => tierBar());
      place(element, [label, ...cells.map((cell) => h("td", { class: "cell" }, cell))]);
    };
    const update = (row) => {
      const { columns, block_size } = this.#answer;
      const now = JSON.stringify([row, columns.map((column) => column.worker)]);
      if (now === shown) return;
      shown = now;
      label.title = `sequence hash ${row.hash}`;
      label.replaceChildren(h("div", { class: "prefix" }, h("code", {}, row.hash.slice(0, 8)), h("span", {}, counted(row.pages, "page")),
        h("span", { class: "quiet" }, `${count(row.pages * block_size)} tokens`), h("span", { class: "quiet" }, counted(row.holders, "holder"))));
      fit(columns);
      const held = new Map(row.cells.map(([column, ...cumulative]) => [column, cumulative]));
      columns.forEach((column, i) => {
        const parts = alone(held.get(i) ?? [0, 0, 0, 0]);
        drawTiers(cells[i], parts, row.pages, `${named(column.worker)}: ${tierWords(parts)} of ${count(row.pages)}`);
      });
    };
    const empty = () => { // the columns may be those of other workers now
      const { columns } = this.#answer;
      shown = "";
      fit(columns);
      columns.forEach((column, i) => drawTiers(cells[i], [0, 0, 0, 0], 1, `${named(column.worker)}: not known now`));
    };
    return { element, update, empty };
  }
}
