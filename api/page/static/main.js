import { getJson } from "./api.js";
import { timeElement } from "./format.js";

async function refresh() {
  const fleet = await getJson("fleet");
  const verdict = document.getElementById("verdict");
  verdict.className = `verdict ${fleet.level}`;
  verdict.replaceChildren(...fleet.verdict.map((part) => (typeof part === "number" ? timeElement(part) : part)));
}

refresh();
setInterval(refresh, 1000);
