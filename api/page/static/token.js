// Asks for the API token. It is kept in this tab and is forgotten when the tab is closed.

import { setToken } from "./api.js";
import { h } from "./dom.js";

/** Show the question. again: called with the token in place. refusal: why a token was refused; empty if there was none. */
export function askForToken(again, refusal) {
  const section = document.getElementById("token");
  if (!section.hidden) return;
  const isSendable = { required: true, maxlength: 4096, pattern: "\\s*[!-~]+\\s*", title: "printable ASCII without spaces" }; // in a header
  const field = h("input", { type: "password", id: "token-field", autocomplete: "current-password", "aria-describedby": "token-about", ...isSendable });
  const form = h("form", { class: "card pad", onsubmit: (event) => {
    event.preventDefault();
    setToken(field.value.trim());
    section.hidden = true;
    section.replaceChildren();
    again();
  } },
  h("h2", { id: "token-title" }, "API token"),
  h("p", { id: "token-about" }, "This service answers with a token only (KVSIGHT_API_TOKEN). It is kept in this tab, until the tab is closed."),
  refusal ? h("p", { class: "problem", role: "alert" }, refusal) : null,
  h("p", {}, h("label", {}, "Token", field), " ", h("button", { type: "submit", class: "main" }, "Show the fleet")));
  section.replaceChildren(form);
  section.hidden = false;
  field.focus();
}
