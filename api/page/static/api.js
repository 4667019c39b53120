// Requests to the service. The token, where one is needed, is kept in this tab only; the moment comes from the address.

import { get } from "./state.js";

const TOKEN = "kvsight-token";
const ANSWER_MS = 10000;
const PAST_ANSWER_MS = 120000; // a moment of a long log is computed first

/** A request that was refused, with the problem document of the service. */
export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail || problem.title || `status ${status}`);
    this.status = status;
    this.problem = problem;
  }
}

export const setToken = (token) => sessionStorage.setItem(TOKEN, token);
export const getToken = () => sessionStorage.getItem(TOKEN);

function headers(more = {}) {
  const token = getToken();
  return token === null ? more : { ...more, Authorization: `Bearer ${token}` };
}

function address(path, params) {
  const url = new URL(path, document.baseURI);
  const given = { at: get("at"), ...params };
  for (const [name, value] of Object.entries(given)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, value);
  }
  return url;
}

async function checked(answer) {
  if (answer.ok) return answer;
  throw new Refused(answer.status, await answer.json().catch(() => ({})));
}

/** GET a path. params: name -> value; empty ones are left out. Throws Refused, or another error if the service is away or hangs. */
export async function getJson(path, params = {}) {
  const signal = AbortSignal.timeout(get("at") === null ? ANSWER_MS : PAST_ANSWER_MS);
  return (await checked(await fetch(address(path, params), { headers: headers(), signal }))).json();
}

/** POST an object, or text that is JSON already. */
export async function postJson(path, body, signal = undefined) {
  const text = typeof body === "string" ? body : JSON.stringify(body);
  const options = { method: "POST", body: text, headers: headers({ "Content-Type": "application/json" }), signal };
  return (await checked(await fetch(address(path, {}), options))).json();
}

/** Follow server-sent events until the signal aborts. on: event name -> function of its data. Ends with the connection. */
export async function events(params, on, signal) {
  const answer = await checked(await fetch(address("events", params), { headers: headers(), signal }));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const name = /^event: (.*)$/m.exec(part)?.[1];
      const data = /^data: (.*)$/m.exec(part)?.[1];
      if (name in on && data) on[name](JSON.parse(data));
    }
  }
}
