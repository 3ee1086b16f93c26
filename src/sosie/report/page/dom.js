// Text from the data enters the page as text nodes and attributes, never as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);

function element(tag, attributes, children) {
  return filled(document.createElement(tag), attributes, children);
}

function shape(tag, attributes, children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(node, attributes = {}, children = []) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...[children].flat().filter((child) => child !== null && child !== undefined));
  return node;
}

// A name in a sentence or a cell, whose writing direction does not affect the rest.
function named(text, className = "name") {
  return element("bdi", { class: className }, text);
}

function announce(text) {
  document.getElementById("announcer").textContent = text;
}

function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}

// A readable number: `digits` decimals, fewer for large ones, powers of ten for tiny ones.
function written(value, digits = 4) {
  if (value === null || value === undefined) return "undefined";
  const size = Math.abs(value);
  if (size !== 0 && size < 0.5 * 10 ** -Math.min(digits, 3)) return value.toExponential(2);
  if (size >= 1e6) return value.toExponential(3);
  if (size >= 10) return String(Number(value.toPrecision(digits + 2)));
  return value.toFixed(digits);
}

function range(low, high, digits = 4) {
  return `${written(low, digits)} to ${written(high, digits)}`;
}

// Draw again whenever the width changes, and only then.
function redrawn(host, draw) {
  let drawn = 0;
  const fit = () => {
    const width = Math.floor(host.clientWidth);
    if (width > 0 && width !== drawn) draw((drawn = width));
  };
  new ResizeObserver(fit).observe(host);
  host.redraw = () => {
    drawn = 0;
    fit();
  };
  return host;
}
