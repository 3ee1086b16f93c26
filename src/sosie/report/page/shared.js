// What the report's pages and the explorer draw with: elements, labels that fit, colours. Types: frontend/shared.d.ts.

export const LABEL = 11; // px
export const LEVELS = 256;

export function element(tag, attributes, children) {
  return filled(document.createElement(tag), attributes, children);
}

export function shape(tag, attributes, children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

export function filled(node, attributes = {}, children = []) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...[children].flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}

// Draw again whenever the width changes, and only then.
export function redrawn(host, draw) {
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

const ruler = document.createElement("canvas").getContext("2d");

export function widthOf(text, size = LABEL) {
  ruler.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
  return ruler.measureText(text).width;
}

// Keep a tail that starts at a number or a part of the name, "encode…11.self_attention"; where that is too long,
// keep only the number, "e…11…attention", which distinguishes the layers.
function cut(letters, most) {
  if (letters.length <= most) return letters.join("");
  const begins = (k) =>
    /[._/]/.test(letters[k - 1]) || (/\d/.test(letters[k]) && !/\d/.test(letters[k - 1]));
  const starts = letters.map((_, k) => k).filter((k) => k && begins(k));
  const start = starts.find((k) => letters.length - k >= 0.45 * most && letters.length - k <= 0.75 * most);
  const tail = start === undefined ? Math.floor(0.6 * most) : letters.length - start;
  const number = letters.join("").match(/\d+(?=\D*$)/u);
  const lost = number && !/\d/.test(letters.slice(letters.length - tail).join(""));
  if (!lost || most < number[0].length + 6) return joined(letters, most, tail, "…");
  const middle = `…${number[0]}…`;
  return joined(letters, most, Math.ceil(0.7 * (most - middle.length)), middle);
}

function joined(letters, most, tail, middle) {
  const head = letters.slice(0, most - middle.length - tail).join("");
  return head + middle + letters.slice(letters.length - tail).join("");
}

export function shortened(name, room, size = LABEL) {
  if (name.length < 400 && widthOf(name, size) <= room) return name;
  const letters = Array.from(name);
  for (let most = Math.min(letters.length, Math.ceil(room / 3)); most > 4; most -= 1) {
    const text = cut(letters, most);
    if (widthOf(text, size) <= room) return text;
  }
  return `${letters[0]}…`;
}

// Places for labels of points [x, y]: beside, above or below the point, or farther away; null if none is free.
// A label is at x, y (left end, middle height); `far`: with a line from the point to the label.
export function placedLabels(points, widths, { width, height, radius = 5 }) {
  const taken = points.map(([x, y]) => [x - radius, y - radius, x + radius, y + radius]);
  const hits = (box) => taken.some((other) => box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3]);
  return points.map(([x, y], k) => {
    const long = widths[k];
    for (const away of [radius + 4, 20, 34, 50, 70, 95, 125, 160]) {
      for (const [dx, dy] of [[1, 0], [-1, 0], [0, -1], [0, 1], [0.8, -0.7], [0.8, 0.7], [-0.8, -0.7], [-0.8, 0.7]]) {
        const left = x + dx * away + (dx > 0 ? 0 : dx < 0 ? -long : -long / 2);
        const middle = y + dy * (away + 5);
        const box = [left - 1, middle - 7, left + long + 1, middle + 7];
        if (box[0] < 0 || box[2] > width || box[1] < 0 || box[3] > height || hits(box)) continue;
        taken.push(box);
        const to = [dx > 0 ? left - 2 : dx < 0 ? left + long + 2 : x, dx ? middle : middle - 8 * dy];
        return { x: left, y: middle, far: away > radius + 4, from: [x, y], to };
      }
    }
    return null;
  });
}

// The colours of all levels between the stops of a ramp.
export function colours(ramp) {
  const stops = ramp.map((hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16)));
  return Array.from({ length: LEVELS }, (_, level) => {
    const at = (level / (LEVELS - 1)) * (stops.length - 1);
    const k = Math.min(Math.floor(at), stops.length - 2);
    const rgb = stops[k].map((from, c) => Math.round(from + (at - k) * (stops[k + 1][c] - from)));
    return `rgb(${rgb.join(",")})`;
  });
}

export function levelOf(value, [far, alike]) {
  return Math.round(clamp((value - far) / (alike - far), 0, 1) * (LEVELS - 1));
}

// The lightness of the ramp only rises, so one threshold decides between dark and light ink.
export function inkOn(level) {
  return level > 0.42 * LEVELS ? "#10131c" : "#f6f7fb";
}
