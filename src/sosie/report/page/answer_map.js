// Models as points, coloured by a common property, with names where they fit.

const GROUPS_MOST = 7; // distinguishable colours; other groups share the last
const LABELS_MOST = 60;

// The largest groups first, each with a number; the others are "others".
function groupsOf(points, by) {
  const counts = new Map();
  points.forEach((point) => counts.set(point[by], (counts.get(point[by]) ?? 0) + 1));
  const sorted = [...counts].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1)).map(([name]) => name);
  return new Map(sorted.map((name, k) => [name, Math.min(k, GROUPS_MOST)]));
}

function mapFigure(points, by) {
  const groups = groupsOf(points, by);
  const host = redrawn(element("div", { class: "curve-host" }), (width) => {
    const [xs, ys] = [points.map((p) => p.x), points.map((p) => p.y)];
    const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    const margin = 28;
    // One scale for both axes: the map is about distances. Rounding (below 0.001) does not spread points.
    const each = Math.min((width - 2 * margin) / Math.max(right - left, 0.01), 560 / Math.max(high - low, 0.01));
    const height = Math.max((high - low) * each, 40) + 2 * margin;
    const offset = (width - (right - left) * each) / 2;
    const place = (p) => [offset + (p.x - left) * each, height - margin - (p.y - low) * each];
    const marks = points.map((p) => markOf(p, groups.get(p[by]), place(p)));
    const labels = points.length <= LABELS_MOST ? labelsOf(points, place, width) : [];
    host.replaceChildren(drawing(width, height, "Models in the plane; the table below has the numbers", [...marks, ...labels]));
  });
  const shown = [...groups].filter(([, k]) => k < GROUPS_MOST);
  const rest = groups.size - shown.length;
  const key = element("ul", { class: "map-key" }, [
    ...shown.map(([name, k]) => element("li", {}, [element("span", { class: `key group-${k}` }), named(name)])),
    rest ? element("li", {}, [element("span", { class: `key group-${GROUPS_MOST}` }), `${rest} others`]) : null,
  ]);
  return [host, key];
}

function markOf(point, group, [x, y]) {
  const mark = shape("circle", { class: `point group-${group}`, cx: x.toFixed(1), cy: y.toFixed(1), r: 4.5 });
  const facts = [["architecture", point.architecture], ["task", point.task], ["tags", point.tag]];
  return tipped(mark, () => [
    element("p", {}, named(point.name)), tipFacts(facts.map(([term, text]) => [term, named(text, "words")])),
  ]);
}

// A name beside its point, left out if it would cover another name or a point.
function labelsOf(points, place, width) {
  const taken = points.map((p) => { const [x, y] = place(p); return [x - 5, y - 5, x + 5, y + 5]; });
  const found = [];
  for (const point of points) {
    const [x, y] = place(point);
    const text = shortened(point.name, 140);
    const size = 6.6 * text.length;
    const from = x + 8 + size > width ? x - 8 - size : x + 8;
    const box = [from, y - 6, from + size, y + 6];
    if (taken.some((other) => box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3])) continue;
    taken.push(box);
    found.push(shape("text", { class: "label", x: from.toFixed(1), y: (y + 4).toFixed(1) }, text));
  }
  return found;
}
