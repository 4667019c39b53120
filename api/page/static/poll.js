// Asks again and again, only while the page is visible and, if an element is given, only while that is on the screen.

const SOON_MS = 200;
const seen = new WeakMap();
const observer = new IntersectionObserver((entries) => {
  for (const entry of entries) seen.get(entry.target)?.(entry.isIntersecting);
}, { rootMargin: "200px" });

export class Poll {
  /** ask: async function. Errors are its own business. element: null polls wherever the reader is. */
  constructor(ask, everyMs, element = null) {
    this.ask = ask;
    this.everyMs = everyMs;
    this.isOnScreen = element === null;
    this.isBusy = false;
    this.isLive = true; // false: asks only when it is told to
    this.isLate = false; // whether it was told to while it was busy
    this.timer = 0;
    this.soonTimer = 0;
    if (element) {
      seen.set(element, (isOnScreen) => {
        const comes = isOnScreen && !this.isOnScreen;
        this.isOnScreen = isOnScreen;
        if (comes) this.now();
      });
      observer.observe(element);
    }
    document.addEventListener("visibilitychange", () => document.hidden || this.now());
    this.now();
  }

  /** Ask in a moment, once for several calls. */
  soon() {
    this.soonTimer ||= setTimeout(() => { this.soonTimer = 0; this.now(); }, SOON_MS);
  }

  /** Ask now. */
  async now() {
    if (this.isBusy) this.isLate = true;
    if (this.isBusy || document.hidden || !this.isOnScreen) return;
    clearTimeout(this.timer);
    this.isBusy = true;
    try {
      do {
        this.isLate = false;
        await this.ask();
      } while (this.isLate);
    } finally {
      this.isBusy = false;
      this.timer = setTimeout(() => this.isLive && this.now(), this.everyMs);
    }
  }
}
