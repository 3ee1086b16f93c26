// Text from the data enters the page as text nodes and attributes, never as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);

// A name in a sentence or a cell, whose writing direction does not affect the rest.
function named(text, className = "name") {
  return element("bdi", { class: className }, text);
}

function announce(text) {
  document.getElementById("announcer").textContent = text;
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
