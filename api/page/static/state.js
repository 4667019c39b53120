// What the page shows is in its address, so that a link shows the same to a colleague.

const listeners = [];

/** The value of a name in the address, or null. Names: at, worker, model, tenant, block_size. */
export const get = (name) => new URL(location.href).searchParams.get(name);

/** Change names in the address; null removes one. push: whether "back" undoes it. */
export function set(changes, { push = true } = {}) {
  const url = new URL(location.href);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "") url.searchParams.delete(name);
    else url.searchParams.set(name, value);
  }
  if (url.href === location.href) return;
  history[push ? "pushState" : "replaceState"](null, "", url);
  notify();
}

/** Call a function after each change of the address. */
export const onChange = (listener) => listeners.push(listener);

const notify = () => listeners.forEach((listener) => listener());
addEventListener("popstate", notify);
