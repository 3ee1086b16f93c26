// Models as points, coloured by a common property, with names where they fit.

const GROUPS_MOST = 8; // distinguishable colours; other groups are grey
const LABELS_MOST = 60;

// The largest groups first, each with a number; the others are "others".
function groupsOf(points, by) {
  const counts = new Map();
  points.forEach((point) => counts.set(point[by], (counts.get(point[by]) ?? 0) + 1));
  const sorted = [...counts].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1)).map(([name]) => name);
  return new Map(sorted.map((name, k) => [name, Math.min(k, GROUPS_MOST)]));
}

function groupClass(k) {
  return k < GROUPS_MOST ? `group-${k}` : "grey";
}

function mapFigure(points, by) {
  const groups = groupsOf(points, by);
  const host = redrawn(element("div", { class: "curve-host" }), (width) => {
    const [xs, ys] = [points.map((p) => p.x), points.map((p) => p.y)];
    const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    const margin = points.length > 1 && points.length <= LABELS_MOST ? clamp(width * 0.08, 28, 90) : 28; // for names
    // One scale for both axes: the map is about distances. Rounding (below 0.001) does not spread points.
    const each = Math.min((width - 2 * margin) / Math.max(right - left, 0.01), 560 / Math.max(high - low, 0.01));
    const height = Math.max((high - low) * each, 120) + 2 * margin;
    const offset = (width - (right - left) * each) / 2;
    const place = (p) => [offset + (p.x - left) * each, (height + (high - low) * each) / 2 - (p.y - low) * each];
    const marks = points.map((p) => markOf(p, groups.get(p[by]), place(p)));
    const labels = points.length <= LABELS_MOST ? labelsOf(points, place, width, height) : [];
    host.replaceChildren(drawing(width, height, "Models in the plane; the table below has the numbers", [...marks, ...labels]));
  });
  const shown = [...groups].filter(([, k]) => k < GROUPS_MOST);
  const rest = groups.size - shown.length;
  const key = element("ul", { class: "map-key" }, [
    ...shown.map(([name, k]) => element("li", {}, [element("span", { class: `key ${groupClass(k)}` }), named(name)])),
    rest ? element("li", {}, [element("span", { class: "key grey" }), `${rest} others`]) : null,
  ]);
  const table = () => [["name", "x", "y", "architecture", "task", "tags"], ...points.map((p) => [p.name, p.x, p.y, p.architecture, p.task, p.tag])];
  return [host, key, tools(downloads(["map"], table, () => host.querySelector("svg")))];
}

function markOf(point, group, [x, y]) {
  const mark = shape("circle", { class: `point ${groupClass(group)}`, cx: x.toFixed(1), cy: y.toFixed(1), r: 4.5 });
  const facts = [["architecture", point.architecture], ["task", point.task], ["tags", point.tag]];
  return tipped(mark, () => [
    element("p", {}, named(point.name)), tipFacts(facts.map(([term, text]) => [term, named(text, "words")])),
  ]);
}

// A name beside its point, or farther away with a line to it; left out only if nothing near is free.
function labelsOf(points, place, width, height) {
  const texts = points.map((point) => shortened(point.name, 140));
  const labels = placedLabels(points.map(place), texts.map((text) => widthOf(text) + 2), { width, height });
  return labels.flatMap((label, k) => (label === null ? [] : [
    label.far ? shape("line", { class: "leader", x1: label.from[0], y1: label.from[1], x2: label.to[0], y2: label.to[1] }) : null,
    shape("text", { class: "label", x: label.x.toFixed(1), y: (label.y + 4).toFixed(1) }, texts[k]),
  ]));
}
