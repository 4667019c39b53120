// The first line: whether the views are true.

import { h } from "./dom.js";
import { duration, timeElement } from "./format.js";

const SYMBOLS = { ok: "●", warning: "◐", trouble: "▲", empty: "○", starting: "◐" };

export class VerdictLine {
  #box = document.getElementById("verdict");
  #updated = document.getElementById("updated");
  #shown = "";
  #answeredAt = 0;

  constructor() {
    setInterval(() => this.#showAge(), 1000);
  }

  show(fleet) {
    this.#answeredAt = performance.now();
    this.#showAge();
    this.#write(fleet.level, fleet.verdict);
    if (fleet.is_past) this.#updated.replaceChildren("as of ", timeElement(fleet.time));
  }

  fail(error) {
    const seen = this.#answeredAt ? ` Figures below are ${duration((performance.now() - this.#answeredAt) / 1000)} old.` : "";
    const said = error.status ? `${error.message}${error.message.endsWith(".") ? "" : "."}` : "The service does not answer.";
    const wayOut = error.problem?.field === "at" ? [" ", h("a", { href: "?" }, "Leave out the moment")] : [];
    this.#write("trouble", [said + seen, ...wayOut]);
  }

  #write(level, parts) {
    const shown = JSON.stringify([level, parts]);
    if (shown === this.#shown) return;
    this.#shown = shown;
    this.#box.className = `verdict ${level}`;
    const words = parts.map((part) => (typeof part === "number" ? timeElement(part) : part));
    this.#box.replaceChildren(h("p", {}, h("span", { class: "symbol", "aria-hidden": "true" }, SYMBOLS[level] ?? "?"), words));
    document.title = `${SYMBOLS[level] ?? ""} kvsight`;
  }

  #showAge() {
    if (this.#updated.querySelector("time")) return;
    const age = (performance.now() - this.#answeredAt) / 1000;
    this.#updated.textContent = !this.#answeredAt ? "" : age < 3 ? "live" : `last answer ${duration(age)} ago`;
  }
}
