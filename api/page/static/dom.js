// Elements. Children are nodes or text, never markup, so names from outside cannot become part of the page.

const SVG = "http://www.w3.org/2000/svg";

// Control and format characters, such as those that turn the direction of writing; spaces but the ordinary one; and what has no shape.
const UNSEEN = /(?! )[\p{C}\p{Z}\p{Default_Ignorable_Code_Point}\u2800]| {2,}/gu;
const codes = (found) => [...found].map((each) => `<U+${each.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}>`).join("");

/** What `h` and `setText` show of a text: characters that cannot be seen become code points. "\uFEFFw" -> "<U+FEFF>w" */
export const visible = (text) => text.replace(UNSEEN, codes);

/** A name, in which spaces at the ends and what looks like a code point are shown by code points, too. */
export const named = (name) => name.replace(/^ +| +$|<(?=U\+)/g, codes);

function codePoint(text) {
  const element = document.createElement("span");
  element.className = "code-point";
  element.textContent = text;
  return element;
}

/** The nodes of a visible text, in which code points are set apart. */
const nodes = (text) => text.split(/(<U\+[0-9A-F]{4,6}>)/).map((part, i) => (i % 2 ? codePoint(part) : part));

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : name === "title" ? visible(value) : String(value));
  }
  const shown = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  element.append(...shown.flatMap((child) => (typeof child === "string" ? nodes(visible(child)) : child)));
  return element;
}

/** Create an element. attributes: name -> value; `onclick` and so on are listeners; null, undefined and false are left out. */
export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

/** The same for SVG. */
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/** Make `nodes` the children of an element. Nodes that are there already stay, with their focus. */
export function place(element, nodes) {
  let next = element.firstChild;
  for (const node of nodes) {
    if (node === next) next = next.nextSibling;
    else element.insertBefore(node, next);
  }
  while (next) {
    const gone = next;
    next = next.nextSibling;
    gone.remove();
  }
}

/** Set the text of a node, only if it differs, so that a selection survives. */
export function setText(node, text) {
  const shown = visible(text);
  if (node.textContent !== shown) node.replaceChildren(...nodes(shown));
}
