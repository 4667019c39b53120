// The ask box: how much of a prompt each worker holds, where it ends, and why.

import { postJson } from "./api.js";
import { h, named, setText } from "./dom.js";
import { alone, drawState, drawTiers, legend, tierBar, tierWords } from "./figures.js";
import { count, counted, duration } from "./format.js";

const INTEGERS = /^[\s,[\]\d]+$/;

/** The body of a query from what somebody pasted. Throws Error with what to do. tokenize: async text -> token ids. */
async function bodyOf(text, space, tokenize) {
  const pasted = text.trim();
  if (!pasted) throw new Error("Paste token ids, a request body, or text.");
  if (pasted.startsWith("{")) {
    let body;
    try {
      body = JSON.parse(pasted);
    } catch (error) {
      throw new Error(`The request body is not JSON: ${error.message}`);
    }
    return { ...(body.model_name === undefined && body.model === undefined && body.modelname === undefined ? ofSpace(space) : {}), ...body };
  }
  if (!space) throw new Error("No model is known yet. Start a worker first.");
  if (INTEGERS.test(pasted)) return { ...ofSpace(space), token_ids: pasted.match(/\d+/g)?.map(Number) ?? [] };
  return { ...ofSpace(space), token_ids: await tokenize(pasted, space) };
}

const ofSpace = (space) => (space ? { model_name: space.model, ...(space.tenant === "default" ? {} : { routing_group: space.tenant }) } : {});

async function tokenize(text, space) {
  const answer = await postJson("tokenize", { model_name: space.model, text });
  return answer.token_ids;
}

/** Worker -> tokens by tier, in either dialect of the answer. */
function instancesOf(answer) {
  if (answer.instances) return Object.entries(answer.instances);
  return Object.values(answer).flatMap((workers) => Object.entries(workers));
}

/** The page at which a prefix ends, in words. */
function endOf(held, asked, pageSize) {
  if (!pageSize) return "";
  const [whole, found] = [Math.floor(asked / pageSize), Math.floor(held / pageSize)];
  return found >= whole ? `all ${counted(whole, "whole page")}` : `ends before page ${count(found + 1)} of ${count(whole)}`;
}

export class Ask {
  #text = h("textarea", { id: "ask-text", spellcheck: "false", placeholder: "1 2 3 …   or   {\"model_name\": \"…\", \"token_ids\": [1, 2, 3]}   or text" });
  #model = h("select", { id: "ask-model" });
  #send = h("button", { type: "submit", class: "main" }, "Ask");
  #answer = h("div", { "aria-live": "polite" });
  #spaces = new Map();
  #pageSizes = new Map();
  #workers = [];
  #abort = null;

  constructor(section) {
    const form = h("form", { class: "card pad", onsubmit: (event) => { event.preventDefault(); this.ask(); } },
      h("p", {}, h("label", { for: "ask-text" }, "A prompt: token ids, the body of a request to ", h("code", {}, "/query"), ", or text, where the service knows a tokenizer")),
      this.#text,
      h("p", {}, h("label", {}, "Model", this.#model), " ", this.#send),
      this.#answer);
    this.#text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.ask();
    });
    section.append(h("header", {}, h("h2", { id: "ask-title" }, "Ask"),
      h("p", {}, "How much of a prompt each worker holds, and why no more")), form);
  }

  /** Offer the models of the fleet. */
  show(fleet) {
    this.#workers = fleet.workers;
    this.#pageSizes = new Map(fleet.workers.map((worker) => [worker.worker, worker.block_size]));
    const found = new Map(fleet.workers.map((worker) => [JSON.stringify([worker.model, worker.tenant]), worker]));
    const keys = [...found.keys()].sort();
    if (String(keys) === this.#model.dataset.keys) return;
    this.#model.dataset.keys = String(keys);
    const before = this.#model.value;
    this.#spaces = new Map(keys.map((key) => [key, { model: found.get(key).model, tenant: found.get(key).tenant }]));
    this.#model.replaceChildren(...keys.map((key) => {
      const { model, tenant } = this.#spaces.get(key);
      return h("option", { value: key }, tenant === "default" ? named(model) : `${named(tenant)} / ${named(model)}`);
    }));
    if (keys.includes(before)) this.#model.value = before;
  }

  async ask() {
    this.#abort?.abort();
    this.#abort = new AbortController();
    const { signal } = this.#abort;
    this.#send.disabled = true;
    try {
      const body = await bodyOf(this.#text.value, this.#spaces.get(this.#model.value), tokenize);
      const answer = await postJson("query", body, signal);
      this.#showAnswer(body, answer, signal);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.#answer.replaceChildren(h("p", { class: "problem", role: "alert" }, error.message));
    } finally {
      this.#send.disabled = false;
    }
  }

  #showAnswer(body, answer, signal) {
    const asked = body.token_ids?.length ?? 0;
    const found = instancesOf(answer).map(([worker, held]) => [worker, held, TIER_FIELDS.map((names) => held[names[0]] ?? held[names[1]] ?? 0)])
      .sort((a, b) => b[1].longest_matched - a[1].longest_matched || (a[0] < b[0] ? -1 : 1));
    const reasons = new Map();
    const rows = found.map(([worker, held, cumulative]) => {
      const bar = tierBar("large");
      const parts = alone(cumulative);
      drawTiers(bar, parts, Math.max(asked, held.longest_matched), `${named(worker)}: ${tierWords(parts, "token")} of ${count(asked)}`);
      const state = h("span");
      drawState(state, held.state, "");
      const why = h("p", { class: "why" });
      reasons.set(worker, why);
      return h("tr", {}, h("td", { "data-label": "Worker", class: "wide" }, h("span", { class: "name" }, named(worker)), h("span", { class: "sub" }, state, ` heard ${duration(held.age_ms / 1000)} ago`)),
        h("td", { "data-label": "Held", class: "number" }, counted(held.longest_matched, "token"),
          h("span", { class: "sub" }, endOf(held.longest_matched, asked, this.#pageSizes.get(worker)))),
        h("td", { "data-label": "By tier", class: "wide share" }, bar, why));
    });
    const sizes = this.#workers.filter((worker) => worker.model === (body.model_name ?? body.model ?? body.modelname)).map((worker) => worker.block_size);
    const smallest = sizes.length ? Math.min(...sizes) : 0;
    const summary = h("p", {}, rows.length
      ? `${counted(rows.length, "worker")} ${rows.length === 1 ? "holds" : "hold"} a part of ${counted(asked, "token")}.`
      : asked < smallest
        ? `These ${counted(asked, "token")} are less than one page of ${smallest}, so that no worker can hold any.`
        : `No worker holds the first page of these ${counted(asked, "token")}.`);
    const note = h("p", { class: "quiet", "aria-live": "polite" }, "Looking for the reasons …");
    this.#answer.replaceChildren(summary, rows.length ? legend() : "",
      h("table", { class: "cards", hidden: !rows.length }, h("thead", {}, h("tr", {}, ["Worker", "Held", "By tier"].map((name, i) => h("th", { scope: "col", class: i === 1 ? "number" : null }, name)))), h("tbody", {}, rows)), note);
    this.#explain(body, reasons, note, signal);
  }

  /** Show why workers held no more. body: of a request to /explain, as text. about: what it is about. */
  async explain(body, about) {
    this.#abort?.abort();
    this.#abort = new AbortController();
    const note = h("p", { class: "quiet", "aria-live": "polite" }, "Looking for the reasons …");
    this.#answer.replaceChildren(h("p", {}, about), note);
    await this.#explain(body, new Map(), note, this.#abort.signal);
  }

  async #explain(body, reasons, note, signal) {
    try {
      const explanation = await postJson("explain", body, signal);
      const others = [];
      for (const worker of explanation.workers) {
        const text = worker.findings.map((finding) => finding.text).join(" ") || worker.cause;
        const line = reasons.get(worker.instance_id);
        const rank = explanation.workers.filter((each) => each.instance_id === worker.instance_id).length > 1 ? `Rank ${worker.dp_rank}: ` : "";
        if (line) line.append(h("span", {}, `${rank}${text} `));
        else others.push(h("p", { class: "why" }, h("span", { class: "name" }, named(worker.instance_id)), `: ${rank}${text}`));
      }
      note.replaceWith(...others);
    } catch (error) {
      if (error.name === "AbortError") return;
      setText(note, error.status === 404 && /no log/.test(error.message)
        ? "Why a prefix ends is told by a service that keeps a log: start it with --record FOLDER." : `No reasons: ${error.message}`);
    }
  }
}

const TIER_FIELDS = [["gpu", "GPU"], ["cpu", "CPU"], ["disk", "DISK"], ["external", "EXTERNAL"]];
