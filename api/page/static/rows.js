// Rows of a table that are kept from one answer to the next, so that focus and reading place survive.

import { place } from "./dom.js";
import { hold } from "./hold.js";

export class Rows {
  /** parent: the <tbody>. key: item -> text. make: item -> {element, update(item)}, or with empty(), which is called for a row that is gone. */
  constructor(parent, key, make) {
    this.parent = parent;
    this.key = key;
    this.make = make;
    this.rows = new Map();
    this.pending = hold.register(() => this.show(this.newest));
    this.newest = [];
  }

  /** Show items in their order. While the reader is scrolling, rows that are there stay where they are. */
  show(items) {
    this.newest = items;
    const wanted = new Map(items.map((item) => [this.key(item), item]));
    if (hold.isHeld && this.rows.size) {
      for (const [key, row] of this.rows) {
        const item = wanted.get(key);
        row.element.classList.toggle("gone", item === undefined);
        if (item !== undefined) row.update(item);
        else row.empty?.();
      }
      const keys = [...this.rows.keys()];
      this.pending([...wanted.keys()].some((key, i) => keys[i] !== key) || keys.length !== wanted.size);
      return;
    }
    const before = this.rows;
    this.rows = new Map();
    for (const [key, item] of wanted) {
      const row = before.get(key) ?? this.make(item);
      row.element.classList.remove("gone");
      row.update(item);
      this.rows.set(key, row);
    }
    place(this.parent, [...this.rows.values()].map((row) => row.element));
    this.pending(false);
  }
}
