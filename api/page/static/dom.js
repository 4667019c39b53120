// Elements. Children are nodes or text, never markup, so names from outside cannot become part of the page.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
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
  if (node.textContent !== text) node.textContent = text;
}
