// Layer by layer: the value at the same depth and of the best match. Up is more alike for every measure.

const CURVE = 210; // px
const LINES = [
  { kind: "partner", title: "same depth", className: "line-depth" },
  { kind: "best", title: "best match", className: "line-best" },
];

// Layers that were paired one to one have only one partner.
function linesOf(found) {
  if (found.pair.stitched && found.pair.inOrder) return [{ ...LINES[0], title: "stitched there" }];
  if (found.pair.shifted) return [{ ...LINES[0], title: "same shift" }];
  return found.pair.inOrder ? LINES.slice(0, 1) : LINES;
}

function curve(found) {
  return layerCurve(found, curveEnds(found), {
    axis: "↑ more alike", foot: `A · ${found.a.name} →`, describe: describeLayer,
    lines: (plan) => [
      ...linesOf(found).map(({ kind, className }) => band(found, plan, kind, className)),
      ...chance(found, plan),
      ...ownOf(found).map(({ value, className }) => line({ ...plan, pitch: 0 }, () => value, className)),
      ...linesOf(found).map(({ kind, className }) => line(plan, (i) => valueAt(found, kind, i), className)),
      nothingDrawn(plan, linesOf(found).flatMap(({ kind }) => found.a.sites.map((_, i) => valueAt(found, kind, i)))),
    ],
  });
}

// What both networks reach themselves, beside what a stitched network does.
function ownOf({ pair, measure, a, b }) {
  return (pair.stitched?.own[measure.name] ?? []).map((value, k) => ({ value, title: `${k ? b.name : a.name} itself`, className: k ? "line-index-2" : "line-index-1" }));
}

// The numbers of the curves, a line for each layer of A.
function curveTable(found) {
  const kinds = ["value", "low", "high", "null"].filter((kind) => found.measure[kind]);
  const lines = linesOf(found);
  return [["site_a", ...lines.flatMap(({ title }) => [`site_b ${title}`, ...kinds.map((kind) => `${kind} ${title}`)])],
    ...found.a.sites.map((site, i) => [site, ...lines.flatMap(({ kind }) => {
      const j = found.measure[kind][i];
      return [j === null ? "" : found.b.sites[j], ...kinds.map((what) => found.at(what, i, j))];
    })])];
}

// Lines over the layers of A, with a ruler that follows the pointer and arrow keys.
function layerCurve(found, ends, { axis, foot, lines, describe }) {
  const host = redrawn(element("div", { class: "curve-host" }), (width) => {
    const plan = curvePlan(found, width, ends);
    const label = `${found.measure.name} by layer of ${found.a.name}. Left and right keys move along the layers.`;
    const svg = drawing(width, plan.height, label, [
      gridLines(plan),
      ...lines(plan),
      footLabels(plan.foot, { left: plan.left, top: plan.top + CURVE, pitch: plan.pitch, leaning: plan.under.leaning }),
      shape("text", { class: "label axis", x: 0, y: 12 }, axis),
      shape("text", { class: "label axis", x: plan.left, y: plan.height - 6 },
        [shape("title", {}, found.a.name), shortened(foot, width - plan.left - 8)]),
    ], { class: "curve", role: "application", tabindex: 0 });
    host.replaceChildren(svg);
    following(svg, found, plan, describe);
  });
  return host;
}

function valueAt(found, kind, i, what = "value") {
  const j = found.measure[kind][i];
  return j === null || j === undefined ? null : drawnAt(found, what, i, j);
}

function curvePlan(found, width, ends) {
  const count = found.a.sites.length;
  const [far, alike] = ends;
  const ticks = ticksBetween(Math.min(far, alike), Math.max(far, alike), 5);
  const foot = axisOf(found.a.sites, clamp(width * 0.25, 64, 150));
  let left = Math.ceil(Math.max(...ticks.map(({ text }) => widthOf(text)))) + 12;
  left = Math.ceil(Math.min(Math.max(left, footRoom(foot, (width - left - 8) / count).overhang), width * 0.3));
  const pitch = (width - left - 8) / count;
  const under = footRoom(foot, pitch);
  const top = 28;
  return {
    width, left, top, pitch, count, foot, under, ticks, height: Math.ceil(top + CURVE + under.height + 26),
    x: (i) => left + (i + 0.5) * pitch,
    y: (value) => top + CURVE * (1 - (value - far) / (alike - far)),
  };
}

// A little beyond the curves and their intervals, or the whole scale; chance belongs to it unless it is far off.
function curveEnds(found) {
  const values = [...curveValues(found), ...(chanceIsFar(found) ? [] : chanceValues(found))];
  const [low, high] = axisEnds(values, found.scale.full, state.whole);
  return found.scale.closer === "up" ? [low, high] : [high, low];
}

function curveValues(found) {
  const kinds = linesOf(found).flatMap(({ kind }) => ["value", "low", "high"].map((what) => [kind, what]));
  return [...kinds.flatMap(([kind, what]) => found.a.sites.map((_, i) => valueAt(found, kind, i, what))), ...ownOf(found).map(({ value }) => value)];
}

function chanceValues(found) {
  return found.a.sites.flatMap((_, i) => [chanceEdge(found, -1)(i), chanceEdge(found, 1)(i)]);
}

// Whether chance would squeeze the curves together.
function chanceIsFar(found) {
  const [values, far] = [curveValues(found), chanceValues(found)].map((some) => some.filter((value) => value !== null));
  if (state.whole || !values.length || !far.length) return false;
  const [low, high] = endsOf(values);
  const [least, most] = endsOf([...values, ...far]);
  return most - least > 2.5 * (high - low);
}

function line(plan, value, className) {
  const points = Array.from({ length: plan.count }, (_, i) => (value(i) === null ? null : [plan.x(i), plan.y(value(i))]));
  return shape("g", { class: className }, broken(points, { dots: plan.pitch >= 9 }));
}

function chance(found, plan) {
  if (!found.measure.null || chanceIsFar(found)) return [];
  const level = line({ ...plan, pitch: 0 }, (i) => valueAt(found, "partner", i, "null"), "line-chance");
  return [ribbon(plan, chanceEdge(found, -1), chanceEdge(found, 1), "line-chance"), level];
}

// Chance at the same depth, minus or plus its spread.
function chanceEdge(found, sign) {
  return (i) => {
    const level = valueAt(found, "partner", i, "null");
    return level === null ? null : level + sign * (valueAt(found, "partner", i, "null_spread") ?? 0);
  };
}

function band(found, plan, kind, className) {
  if (!found.hasRange) return null;
  return ribbon(plan, (i) => valueAt(found, kind, i, "low"), (i) => valueAt(found, kind, i, "high"), className);
}

// A single layer, or one between two undefined ones, has a band just wide enough to be seen.
function ribbon(plan, low, high, className) {
  const defined = Array.from({ length: plan.count }, (_, i) => (low(i) === null || high(i) === null ? null : i));
  const paths = runs(defined).map((run) => {
    const alone = () => [-4, 4].map((aside) => [run[0], plan.x(run[0]) + aside]);
    const places = run.length > 1 ? run.map((i) => [i, plan.x(i)]) : alone();
    const edge = (value) => places.map(([i, x]) => `${x.toFixed(1)} ${plan.y(value(i)).toFixed(1)}`);
    return shape("path", { class: "band", d: `M${[...edge(high), ...edge(low).reverse()].join("L")}Z` });
  });
  return shape("g", { class: className }, paths);
}

function following(svg, found, plan, describe) {
  const ruler = shape("line", { class: "ruler", y1: plan.top, y2: plan.top + CURVE, visibility: "hidden" });
  svg.append(ruler);
  let layer = null;
  const show = (i, x, y) => {
    layer = i;
    filled(ruler, { x1: plan.x(i), x2: plan.x(i), visibility: "visible" });
    showTip(describe(found, i), x, y);
  };
  const leave = () => {
    ruler.setAttribute("visibility", "hidden");
    hideTip();
  };
  const point = (event) => {
    const i = Math.floor((event.clientX - svg.getBoundingClientRect().left - plan.left) / plan.pitch);
    if (i >= 0 && i < plan.count) show(i, event.clientX, event.clientY);
    else leave();
  };
  for (const name of ["pointermove", "pointerdown"]) svg.addEventListener(name, point);
  for (const name of ["pointerleave", "blur"]) svg.addEventListener(name, leave);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const area = svg.getBoundingClientRect();
    const i = layer === null ? 0 : clamp(layer + step, 0, plan.count - 1);
    show(i, area.left + plan.x(i), area.top + plan.top);
    announce(tip.textContent);
  });
}

function describeLayer(found, i) {
  const lines = linesOf(found).map(({ kind, title, className }) => {
    const j = found.measure[kind][i];
    const between = j === null ? "" : rangeAt(found, i, j);
    return element("p", { class: `tip-line ${className}` }, [
      element("span", { class: "key" }, ""),
      `${title} `,
      element("strong", {}, written(j === null ? null : found.at("value", i, j))),
      between ? element("span", { class: "quiet" }, ` ${between} `) : null,
      j === null ? null : named(found.b.sites[j]),
      j === null || !found.measure.null ? null
        : element("span", { class: "quiet below" }, chanceInWords(found, i, j).join(" · ")),
    ]);
  });
  return [tipSite(found.a, i), ...lines];
}
