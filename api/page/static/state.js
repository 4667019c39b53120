// What the page shows is in its address, so that a link shows the same to a colleague.

const WRITE_EVERY_MS = 400; // browsers refuse more than about three changes of the address a second

const listeners = [];
let url = new URL(location.href);
let writing = null;
let written = -WRITE_EVERY_MS;

/** The value of a name in the address, or null. Names: at, range, order, worker, model, tenant, block_size. */
export const get = (name) => url.searchParams.get(name);

/** Change names in the address; null removes one. push: whether "back" undoes it. */
export function set(changes, { push = true } = {}) {
  const next = new URL(url);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "") next.searchParams.delete(name);
    else next.searchParams.set(name, value);
  }
  if (next.href === url.href) return;
  if (push) write();
  url = next;
  if (push) history.pushState(null, "", url);
  else writing ??= setTimeout(write, Math.max(0, written + WRITE_EVERY_MS - performance.now()));
  notify();
}

/** Call a function after each change of the address. */
export const onChange = (listener) => listeners.push(listener);

const notify = () => listeners.forEach((listener) => listener());

/** Write what changed without "back" to the address. */
function write() {
  clearTimeout(writing);
  writing = null;
  if (url.href === location.href) return;
  history.replaceState(null, "", url);
  written = performance.now();
}

addEventListener("popstate", () => {
  clearTimeout(writing);
  writing = null;
  url = new URL(location.href);
  notify();
});
