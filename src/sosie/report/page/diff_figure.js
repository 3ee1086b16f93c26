// The error along the layers on a logarithmic axis: the whole error, what each layer makes itself, and the floor.

const CURVE = 250; // px
const SERIES = [
  { key: "error", title: "whole error", className: "line-depth" },
  { key: "made", title: "made here", className: "line-best" },
];

const asked = DATA.sites.filter(({ inside }) => !inside);

// Powers of ten around all that is drawn; an error of 0 has no logarithm and stands on the axis.
function decades() {
  const known = asked.flatMap(({ error, made, floor, made_floor: own }) => [error, made, floor, own])
    .filter((value) => value !== null && value > 0).map(Math.log10);
  if (!known.length) return [-8, 0];
  const [low, high] = [Math.floor(Math.min(...known) - 0.2), Math.ceil(Math.max(...known) + 0.2)];
  return [low, Math.max(high, low + 2)];
}

function powerOf(ten) {
  return ten === 0 ? "1" : Number(`1e${ten}`).toExponential();
}

function errorFigure() {
  const host = redrawn(element("div", { class: "curve-host" }), (width) => host.replaceChildren(errorDrawing(width)));
  return host;
}

function errorDrawing(width) {
  const [low, high] = decades();
  const foot = axisOf(asked.map(({ site_a: name }) => name), clamp(width * 0.25, 64, 150));
  const powers = Array.from({ length: high - low + 1 }, (_, k) => low + k);
  const step = every(CURVE / (high - low), 18);
  const ticks = powers.filter((k) => (k - low) % step === 0).map((k) => ({ value: 10 ** k, text: powerOf(k) }));
  let left = Math.ceil(Math.max(...ticks.map(({ text }) => widthOf(text)))) + 12;
  left = Math.ceil(Math.min(Math.max(left, footRoom(foot, (width - left - 8) / asked.length).overhang), width * 0.3));
  const pitch = (width - left - 8) / asked.length;
  const under = footRoom(foot, pitch);
  const top = 28;
  const plan = {
    width, left, ticks,
    x: (i) => left + (i + 0.5) * pitch,
    y: (value) => top + CURVE * (1 - clamp(((value > 0 ? Math.log10(value) : low) - low) / (high - low), 0, 1)),
  };
  const points = (key) => asked.map((site, i) => (site[key] === null ? null : [plan.x(i), plan.y(site[key])]));
  const ruler = shape("line", { class: "ruler", y1: top, y2: top + CURVE, visibility: "hidden" });
  const svg = drawing(width, Math.ceil(top + CURVE + under.height + 26),
    "Relative error of each layer, on a logarithmic axis; the table below has the numbers.", [
      floorBand(plan, pitch, top + CURVE), gridLines(plan),
      ...SERIES.map(({ key, className }) => shape("g", { class: className }, broken(points(key), { dots: true }))),
      ...asked.flatMap(({ error, beyond }, i) => (beyond && error !== null
        ? [shape("circle", { class: "beyond-ring", cx: plan.x(i), cy: plan.y(error), r: 6 })] : [])),
      nothingDrawn(plan, asked.flatMap(({ error, made }) => [error, made])), ruler,
      footLabels(foot, { left, top: top + CURVE, pitch, leaning: under.leaning }),
      shape("text", { class: "label axis", x: 0, y: 12 }, "↑ ‖a − b‖ / ‖a‖"),
      shape("text", { class: "label axis", x: left, y: Math.ceil(top + CURVE + under.height + 20) }, "layers, from input to output →"),
    ], { class: "curve" });
  tipped(svg, (event) => {
    const i = clamp(Math.floor((event.clientX - svg.getBoundingClientRect().left - left) / pitch), 0, asked.length - 1);
    filled(ruler, { x1: plan.x(i), x2: plan.x(i), visibility: "visible" });
    return siteTip(asked[i]);
  });
  svg.addEventListener("pointerleave", () => filled(ruler, { visibility: "hidden" }));
  return svg;
}

// What must not matter: up to the floor dark, up to the factor at which an error counts light.
function floorBand(plan, pitch, bottom) {
  return shape("g", { class: "floor" }, asked.flatMap(({ floor }, i) => {
    if (floor === null) return [];
    const bar = (most, className) => {
      const y = plan.y(most);
      return shape("rect", { class: className, x: plan.x(i) - pitch / 2, width: pitch, y, height: Math.max(bottom - y, 0) });
    };
    return [DATA.factor === null ? null : bar(floor * DATA.factor, "floor-most"), bar(floor, "floor-own")].filter(Boolean);
  }));
}

function siteTip(site) {
  const names = site.site_a === site.site_b ? [named(site.site_a)] : [named(site.site_a), " = ", named(site.site_b)];
  return [
    tipValue(number(site.error), site.beyond ? "beyond the floor" : "within the floor"),
    element("p", {}, names),
    tipFacts([["made here", number(site.made)], ["floor", number(site.floor)], ["SQNR", site.sqnr === null ? "–" : `${site.sqnr.toFixed(1)} dB`]]),
    tipNotes(site.notes),
  ].filter(Boolean);
}

// Errors span many powers of ten.
function number(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e-3 && size < 1e4 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}
