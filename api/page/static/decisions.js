// The funnel of the last hour, and the newest decisions.

import { getJson } from "./api.js";
import { h, named, setText } from "./dom.js";
import { count, counted, percent, timeElement } from "./format.js";
import { Rows } from "./rows.js";

const COLUMNS = ["Time", "Request", "Worker", "Prompt", "Best candidate", "Predicted", "Delivered"];

export class Decisions {
  #count = h("p");
  #steps = h("dl", { class: "funnel" });
  #hint = h("p", { class: "why" });
  #body = h("tbody");
  #card;
  #empty;

  constructor(section) {
    this.#card = h("div", { hidden: true },
      h("div", { class: "card pad" }, this.#steps, this.#hint),
      h("h3", {}, "Newest decisions"),
      h("div", { class: "card scroll", tabindex: 0, role: "region", "aria-label": "Newest decisions" }, h("table", { class: "cards" },
        h("thead", {}, h("tr", {}, COLUMNS.map((name, i) => h("th", { scope: "col", class: i > 2 ? "number" : null }, name)))), this.#body)));
    this.#empty = h("p", { class: "card empty" }, "No decisions in the last hour. Let your router report what it chose and what the engine reused: ",
      h("code", {}, "POST /decisions"), ", or ", h("code", {}, "Client.report_decisions()"), " of the Python client. Requests that your router books here count, too.");
    section.append(h("header", {}, h("h2", { id: "decisions-title" }, "Decisions"), this.#count), this.#card, this.#empty);
    this.rows = new Rows(this.#body, (decision) => decision.request_id, row);
  }

  async refresh() {
    const funnel = await getJson("funnel");
    const { all, finished } = funnel;
    const isEmpty = !all.requests && !funnel.decisions.length;
    this.#card.hidden = isEmpty;
    this.#empty.hidden = !isEmpty;
    setText(this.#count, isEmpty ? "" : `${counted(all.requests, "request")} in the last hour, ${count(finished.requests)} with an outcome`);
    const sums = finished.requests ? finished : all;
    const steps = [
      ["Tokens of prompts", sums.prompt_tokens],
      ["held by the best candidate", sums.best_tokens],
      ["predicted for the chosen worker", sums.predicted_tokens],
      ["delivered by its engine", finished.requests ? sums.cached_tokens : null],
    ];
    this.#steps.replaceChildren(...steps.flatMap(([name, tokens]) => {
      const share = tokens === null || !sums.prompt_tokens ? 0 : tokens / sums.prompt_tokens;
      const fill = h("div", { class: "fill" });
      fill.style.width = `${Math.min(100, 100 * share)}%`;
      return [h("dt", {}, name), h("dd", { class: "track" }, fill),
        h("dd", { class: "share number" }, tokens === null ? "not reported" : `${count(tokens)} (${percent(share)})`)];
    }));
    setText(this.#hint, lost(sums, finished.requests));
    this.rows.show(funnel.decisions);
  }
}

/** Where most tokens were lost, in a sentence. */
function lost(sums, outcomes) {
  const losses = [
    [sums.best_tokens - sums.predicted_tokens, "the router chose a worker that holds less than the best one, for example because of load"],
    [outcomes ? sums.predicted_tokens - sums.cached_tokens : 0, "engines delivered less than predicted: pages were evicted before the request arrived, or the view was stale"],
  ].sort((a, b) => b[0] - a[0]);
  const [tokens, why] = losses[0];
  if (tokens <= 0) return "Nothing that was held is lost on the way.";
  return `${counted(tokens, "token")} were held and not used: ${why}. kvsight audit of a recording names the causes.`;
}

function row(decision) {
  const cells = COLUMNS.map((name, i) => h("td", { "data-label": name, class: i > 2 ? "number" : i < 2 ? null : "name" }));
  cells[0].append(timeElement(decision.time));
  cells[1].append(h("code", {}, named(decision.request_id)));
  const update = (each) => {
    setText(cells[2], each.dp_rank ? `${named(each.worker)} / ${each.dp_rank}` : named(each.worker));
    const known = (tokens) => (tokens === null ? "–" : count(tokens));
    [each.prompt_tokens, each.best_tokens, each.predicted_tokens, each.cached_tokens].forEach((tokens, i) => setText(cells[3 + i], known(tokens)));
  };
  return { element: h("tr", {}, cells), update };
}
