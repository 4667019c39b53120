// Start here. Each section has a class that shows one answer; polls bring the answers.

import { events, getJson, getToken } from "./api.js";
import { Ask } from "./ask.js";
import { Decisions } from "./decisions.js";
import { Poll } from "./poll.js";
import { Quality } from "./quality.js";
import { ResidencyMap } from "./residency.js";
import { get, onChange, set } from "./state.js";
import { askForToken } from "./token.js";
import { VerdictLine } from "./verdict.js";
import { WorkerView } from "./worker.js";
import { Workers } from "./workers.js";

const section = (id) => document.getElementById(id);
const OUTSIDE_THE_LOG = "urn:kvsight:problem:outside-the-log";
const LACKS_READ = "This token does not permit reading: it lacks the scope read.";
const UNKNOWN = "The service does not know this token.";
const RECONNECT_MS = 5000;
const SLOW_MS = 5000;
const LISTS = ["quality", "workers", "residency", "ask", "decisions"].map(section);

const verdict = new VerdictLine();
const workers = new Workers(section("workers"), () => polls.fleet.now());
const map = new ResidencyMap(section("residency"));
const ask = new Ask(section("ask"));
const quality = new Quality(section("quality"), (body, about) => ask.explain(body, about));
const decisions = new Decisions(section("decisions"));
const worker = new WorkerView(section("worker"));
let past = null;
let isRefused = false;
let isFollowing = false; // whether the page is told about changes of states
let shown = Promise.resolve(); // when everything that was asked for is on the screen

async function refreshFleet() {
  const slow = setTimeout(() => get("at") ?? verdict.fail(new Error("slow")), SLOW_MS);
  const { contains } = workers;
  const fleet = await getJson("fleet", { contains }).finally(() => clearTimeout(slow));
  verdict.show(fleet);
  workers.show(fleet);
  if (!contains) ask.show(fleet);
  if (fleet.is_past) await showPast();
  else followStates();
}

/** Ask for the fleet as soon as a view changes its state. The polls go on, so that nothing depends on it. */
async function followStates() {
  if (isFollowing) return;
  isFollowing = true;
  try {
    await events({ kind: "state" }, { state: () => polls.fleet.soon() });
  } catch {
    // the poll of the fleet reports a service that is away
  } finally {
    setTimeout(() => { isFollowing = false; }, RECONNECT_MS);
  }
}

async function showPast() {
  if (past !== null) return;
  past = import("./past.js");
  (await past).startPast({ root: section("past"), setLive, shown: () => shown });
}

/** Wrap a refresh, so that an error is shown in the verdict, and a missing token asked for. */
function guarded(ask) {
  return async () => {
    if (isRefused) return;
    const token = getToken();
    try {
      await ask();
    } catch (error) {
      if (error.status === 401 || error.status === 403) {
        if (getToken() !== token) return; // the token was given since, and `refresh` asks again with it
        isRefused = true;
        askForToken(() => { isRefused = false; refresh(); }, error.status === 403 ? LACKS_READ : token ? UNKNOWN : "");
      }
      if (error.problem?.type === OUTSIDE_THE_LOG) await showPast();
      verdict.fail(error);
    }
  };
}

const polls = {
  fleet: new Poll(guarded(refreshFleet), 2000),
  quality: new Poll(guarded(() => quality.refresh()), 10000, section("quality")),
  map: new Poll(guarded(() => map.refresh()), 5000, section("residency")),
  decisions: new Poll(guarded(() => decisions.refresh()), 10000, section("decisions")),
  worker: new Poll(guarded(() => worker.refresh()), 1000, section("worker")),
};

/** Ask for everything that is on the screen now. */
function refresh() {
  return Promise.all(Object.values(polls).map((poll) => poll.now()));
}

/** Whether polls go on by themselves. The page over the past asks only when the moment changes. */
function setLive(isLive) {
  for (const poll of Object.values(polls)) poll.isLive = isLive;
}

function route() {
  worker.route();
  for (const list of LISTS) list.hidden = worker.chosen !== null;
}

document.querySelector(".links").addEventListener("click", (event) => {
  if (event.target.hash) set({ worker: null, model: null, tenant: null, block_size: null });
});
onChange(() => {
  route();
  shown = refresh();
});
route();
