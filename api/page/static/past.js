// The page over the past: a moment of a log, the way to another one, and the difference of two. The live page does not
// load this module.

import { getJson } from "./api.js";
import { h, named, setText, svg } from "./dom.js";
import { count, counted, duration, localTime, timeElement, utc } from "./format.js";
import { get, onChange, set } from "./state.js";

const SPEEDS = [1, 10, 100, 1000];
const TICK_MS = 250;
const SEARCHING_MS = 1000;
const GROWING_MS = 10000;
const PLACES = 1000; // where marks are drawn
const MAX_LISTED = 100;
const LANES = [
  { name: "fault", plural: "faults", symbol: "▲", kinds: ["gap", "digest", "degraded", "rejected"] },
  { name: "restart", plural: "restarts", symbol: "◆", kinds: ["restart"] },
  { name: "resync", plural: "resyncs", symbol: "●", kinds: ["resync"] },
];

const laneOf = (mark) => LANES.find((lane) => lane.kinds.includes(mark.kind)) ?? LANES[0];
const sum = (counts) => Object.values(counts).reduce((all, each) => all + each, 0);
const button = (text, label, onclick) => h("button", { type: "button", "aria-label": label, title: label, onclick }, text);
const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

class Past {
  #page;
  #span = null;
  #moment = null;
  #isPlaying = false;
  #wanted = null; // where the slider was moved to
  #isMoving = false;
  #parts;

  constructor(page) {
    this.#page = page;
    page.setLive(false);
    this.#build(page.root);
    onChange(() => this.#refresh());
    this.#follow();
    this.#refresh();
  }

  #build(root) {
    const parts = this.#parts = {
      play: button("▶ Play", "Play (space)", () => this.#toggle()),
      speed: h("select", { "aria-label": "Speed" }, SPEEDS.map((speed) => h("option", { value: speed }, `${count(speed)}×`))),
      when: h("strong", { class: "when" }), place: h("span", { class: "quiet" }), batch: h("p", { class: "why" }),
      slider: h("input", { type: "range", step: "any", class: "slider", "aria-label": "Moment of the log", "aria-describedby": "past-keys" }),
      marks: svg("svg", { class: "marks", viewBox: `0 0 ${PLACES} 30`, preserveAspectRatio: "none", role: "img" }),
      ends: h("div", { class: "ends quiet" }), legend: h("ul", { class: "legend" }), list: h("ol", { class: "timeline" }),
      listTitle: h("summary"), damage: h("div", { class: "problem", role: "alert", hidden: true }), problem: h("p", { class: "problem", role: "status" }),
      compare: h("button", { type: "button", onclick: () => this.#compare() }, "Compare with this moment"), difference: h("section", { "aria-label": "Difference of two moments" }),
    };
    parts.speed.value = "10";
    parts.slider.addEventListener("input", () => this.#slide(Number(parts.slider.value)));
    parts.marks.addEventListener("click", (event) => this.#pick(event));
    root.addEventListener("keydown", (event) => this.#key(event));
    root.append(
      h("div", { class: "card pad" },
        parts.damage,
        h("div", { class: "controls" },
          button("⇤", "Previous mark (page down)", () => this.#jump(-1)), button("‹", "One batch back (left arrow)", () => this.#step("previous")), parts.play,
          button("›", "One batch forward (right arrow)", () => this.#step("next")), button("⇥", "Next mark (page up)", () => this.#jump(1)), parts.speed,
          h("span", {}, parts.when, " ", parts.place), h("span", { class: "push" }, parts.compare)),
        h("div", { class: "track" }, parts.marks, parts.slider, parts.ends),
        parts.legend, parts.batch, parts.problem,
        h("p", { class: "why", id: "past-keys" }, "On the slider, arrows step from batch to batch, page up and page down from mark to mark, and space plays."),
        h("details", {}, parts.listTitle, parts.list)),
      parts.difference);
    root.hidden = false;
  }

  /** Ask for the span until the whole log has been searched for marks, and then now and then, because it may grow. */
  async #follow() {
    for (;;) {
      let isSearched = false;
      try {
        this.#span = await getJson("span");
        isSearched = this.#span.marks_until >= this.#span.next_index || this.#span.marks_failure !== "";
        this.#showSpan();
      } catch (error) {
        setText(this.#parts.problem, error.message);
      }
      await wait(isSearched ? GROWING_MS : SEARCHING_MS);
    }
  }

  /** Show the moment in the address. */
  async #refresh() {
    const at = get("at");
    try {
      const moment = await getJson("moment", { at });
      if (at !== get("at")) return;
      if (at === null) set({ at: moment.at }, { push: false });
      this.#moment = moment;
      setText(this.#parts.problem, "");
      this.#showMoment();
      this.#showList();
      if (!this.#isPlaying) await this.#showDifference();
    } catch (error) {
      setText(this.#parts.problem, error.message);
    }
  }

  // --- ways to another moment ---

  #go(at, push = true) {
    set({ at }, { push });
    return this.#page.shown();
  }

  async #step(step) {
    this.#pause();
    try {
      const moment = await getJson("moment", { at: get("at"), step });
      await this.#go(moment.at, false);
    } catch (error) {
      setText(this.#parts.problem, error.message);
    }
  }

  /** Go to the next mark, or to the previous one. */
  #jump(direction) {
    this.#pause();
    const here = this.#moment?.index ?? 0;
    const marks = this.#span?.marks ?? [];
    const found = direction > 0 ? marks.find((mark) => mark.index + 1 > here) : marks.findLast((mark) => mark.index + 1 < here);
    if (found) this.#go(String(found.index + 1));
    else setText(this.#parts.problem, `No mark is ${direction > 0 ? "after" : "before"} this moment.`);
  }

  async #slide(time) {
    this.#pause();
    this.#wanted = time;
    if (this.#isMoving) return;
    this.#isMoving = true;
    try {
      while (this.#wanted !== null) {
        const wanted = this.#wanted;
        this.#wanted = null;
        await this.#go(this.#at(wanted), false);
      }
    } finally {
      this.#isMoving = false;
    }
  }

  #at(time) {
    const inside = Math.min(Math.max(time, this.#span.first_time), this.#span.last_time);
    return `@${Math.round(inside * 1000) / 1000}`;
  }

  #toggle() {
    if (this.#isPlaying) this.#pause();
    else this.#play();
  }

  #pause() {
    this.#isPlaying = false;
    this.#showPlaying();
  }

  async #play() {
    if (this.#span === null || this.#moment === null) return;
    this.#isPlaying = true;
    this.#showPlaying();
    let time = this.#moment.time;
    if (time >= this.#span.last_time) time = this.#span.first_time;
    let before = performance.now();
    try {
      while (this.#isPlaying && time < this.#span.last_time) {
        await wait(TICK_MS);
        const now = performance.now();
        time += (Number(this.#parts.speed.value) * (now - before)) / 1000;
        before = now;
        if (this.#isPlaying) await this.#go(this.#at(time), false);
      }
    } finally {
      this.#pause();
    }
    await this.#refresh();
  }

  #key(event) {
    if (event.target !== this.#parts.slider) return;
    const doing = {
      ArrowLeft: () => this.#step("previous"), ArrowDown: () => this.#step("previous"), ArrowRight: () => this.#step("next"), ArrowUp: () => this.#step("next"),
      PageUp: () => this.#jump(1), PageDown: () => this.#jump(-1), " ": () => this.#toggle(),
    }[event.key];
    if (doing === undefined) return;
    event.preventDefault();
    doing();
  }

  /** Go to the mark that was clicked at. */
  #pick(event) {
    const { left, width } = this.#parts.marks.getBoundingClientRect();
    const place = ((event.clientX - left) / width) * PLACES;
    const far = (mark) => Math.abs(this.#place(mark.time) - place);
    const nearest = this.#span?.marks.reduce((best, mark) => (best === null || far(mark) < far(best) ? mark : best), null);
    if (!nearest) return;
    this.#pause();
    this.#go(String(nearest.index + 1));
  }

  // --- drawing ---

  #place(time) {
    const { first_time: first, last_time: last } = this.#span;
    return last > first ? ((time - first) / (last - first)) * PLACES : 0;
  }

  #showSpan() {
    const { slider, ends, marks, legend, damage } = this.#parts;
    const span = this.#span;
    slider.min = span.first_time;
    slider.max = span.last_time;
    ends.replaceChildren(timeElement(span.first_time), h("span", {}, `${span.log}: ${duration(span.last_time - span.first_time)}, ${counted(span.next_index - span.first_index, "record")}`), timeElement(span.last_time));
    const drawn = new Set();
    for (const mark of span.marks) drawn.add(`${LANES.indexOf(laneOf(mark))} ${Math.round(this.#place(mark.time))}`);
    marks.replaceChildren(...Array.from(drawn, (each) => {
      const [lane, place] = each.split(" ").map(Number);
      return svg("rect", { class: LANES[lane].name, x: place - 1.5, y: lane * 10 + 1, width: 3, height: 8 });
    }));
    const found = LANES.map((lane) => [lane, lane.kinds.reduce((all, kind) => all + (span.num_marks[kind] ?? 0), 0)]);
    const words = found.map(([lane, number]) => counted(number, lane.name, lane.plural));
    marks.setAttribute("aria-label", `Marks over the log: ${words.join(", ")}`);
    const searched = span.marks_until - span.first_index;
    const whole = Math.max(1, span.next_index - span.first_index);
    legend.replaceChildren(
      ...found.map(([lane], number) => h("li", {}, h("span", { class: `mark ${lane.name}`, "aria-hidden": "true" }, lane.symbol), ` ${words[number]}`)),
      ...(span.marks_failure ? [h("li", {}, `The search for marks has failed: ${span.marks_failure}`)]
        : searched < whole ? [h("li", {}, `searching for marks: ${Math.floor((100 * searched) / whole)}%`)] : []));
    damage.hidden = !span.damage.length;
    damage.replaceChildren(...(span.damage.length ? ["Some of this log cannot be read. What is shown comes from the rest.",
      h("ul", {}, span.damage.slice(0, MAX_LISTED).map((line) => h("li", {}, line)))] : []));
    this.#showMoment();
    this.#showList();
  }

  #showMoment() {
    const { slider, when, place, batch } = this.#parts;
    const moment = this.#moment;
    if (moment === null) return;
    if (document.activeElement !== slider || this.#wanted === null) slider.value = moment.time;
    slider.setAttribute("aria-valuetext", `${localTime(moment.time)}, ${utc(moment.time)}`);
    when.replaceChildren(timeElement(moment.time));
    const end = this.#span === null ? "" : ` of ${count(this.#span.next_index)}`;
    setText(place, `record ${count(moment.index)}${end}`);
    const newest = moment.batch;
    batch.replaceChildren(...(newest === null ? ["No batch yet."] : [
      "Newest batch: ", h("strong", {}, named(newest.worker)), `, number ${count(newest.seq)}, at `, timeElement(newest.time),
      `: ${counted(sum(newest.stored), "page")} stored, ${count(sum(newest.removed))} removed.`]));
  }

  /** List the marks around the moment. */
  #showList() {
    if (this.#span === null) return;
    const { list, listTitle } = this.#parts;
    const { marks } = this.#span;
    const here = this.#moment?.index ?? 0;
    const next = marks.findIndex((mark) => mark.index >= here);
    const first = Math.max(0, (next < 0 ? marks.length : next) - MAX_LISTED / 2);
    const listed = marks.slice(first, first + MAX_LISTED);
    setText(listTitle, marks.length > listed.length ? `Marks around this moment (${count(listed.length)} of ${count(marks.length)})` : `Marks (${count(marks.length)})`);
    list.replaceChildren(...listed.map((mark) => h("li", {},
      h("a", { href: "?", onclick: (event) => { event.preventDefault(); this.#pause(); this.#go(String(mark.index + 1)); } }, timeElement(mark.time)),
      h("span", {}, h("span", { class: `mark ${laneOf(mark).name}`, "aria-hidden": "true" }, laneOf(mark).symbol), ` ${mark.text}`))));
  }

  #showPlaying() {
    setText(this.#parts.play, this.#isPlaying ? "❚❚ Pause" : "▶ Play");
    this.#parts.play.setAttribute("aria-label", this.#isPlaying ? "Pause (space)" : "Play (space)");
  }

  // --- comparison ---

  #compare() {
    set({ from: get("from") === null ? this.#moment?.at ?? null : null });
  }

  async #showDifference() {
    const { compare, difference } = this.#parts;
    const from = get("from");
    const at = get("at");
    setText(compare, from === null ? "Compare with this moment" : "Stop comparing");
    if (from === null || from === at) {
      difference.replaceChildren(...(from === null ? [] : [h("p", { class: "empty" }, "Go to another moment to see what has changed since this one.")]));
      return;
    }
    const [before, found] = await Promise.all([getJson("moment", { at: from }), getJson("diff", { from })]);
    if (from !== get("from") || at !== get("at")) return;
    const changed = found.filter((each) => each.gained || each.lost || each.moved);
    const weight = (each) => each.gained + each.lost + each.moved;
    changed.sort((one, other) => weight(other) - weight(one));
    const columns = ["Worker", "Pages before", "Pages after", "Gained", "Lost", "Moved to other tiers"];
    const row = (each) => {
      const several = found.some((other) => other !== each && other.worker === each.worker);
      const name = several ? `${named(each.worker)} (${named(each.model)}, rank ${each.dp_rank})` : named(each.worker);
      const cells = [each.before, each.after, each.gained, each.lost, each.moved];
      return h("tr", {}, h("td", { class: "name first wide", "data-label": columns[0] }, name),
        cells.map((number, column) => h("td", { class: "number", "data-label": columns[column + 1] }, count(number))));
    };
    difference.replaceChildren(
      h("header", {}, h("h2", {}, "Difference"), h("p", {}, "of what the workers hold, from ", timeElement(before.time), " to ", timeElement(this.#moment.time),
        `. ${counted(found.length - changed.length, "stream")} without a difference.`)),
      ...(changed.length ? [h("div", { class: "card" }, h("table", { class: "cards difference" },
        h("thead", {}, h("tr", {}, columns.map((name, column) => h("th", { scope: "col", class: column ? "number" : "" }, name)))),
        h("tbody", {}, changed.slice(0, 2 * MAX_LISTED).map(row))))] : []));
  }
}

/** Show the controls of the past. page: `root`, an empty section; `setLive`; `shown`, which returns a promise of what is asked for. */
export function startPast(page) {
  return new Past(page);
}
