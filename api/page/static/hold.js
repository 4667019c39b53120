// Rows hold still while somebody reads further down the page. Figures in them stay live, and a button catches up.

import { h } from "./dom.js";

const FROM_PX = 60;

class Hold {
  isHeld = false;
  #waiting = new Set();
  #shows = [];
  #box = document.getElementById("held");

  constructor() {
    this.#box.append("Rows stay where they are while you read.",
      h("button", { type: "button", onclick: () => this.#release() }, "Catch up"));
    addEventListener("scroll", () => {
      if (scrollY >= FROM_PX) this.isHeld = true;
      else if (this.isHeld) this.#release();
    }, { passive: true });
  }

  /** show: called to show everything in its order. Returns a function that tells whether there is something new to show. */
  register(show) {
    this.#shows.push(show);
    return (isWaiting) => {
      this.#waiting[isWaiting ? "add" : "delete"](show);
      this.#box.hidden = !this.#waiting.size;
    };
  }

  #release() {
    this.isHeld = false;
    this.#shows.forEach((show) => show());
  }
}

export const hold = new Hold();
