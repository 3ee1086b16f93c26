// The page: two times to move, and everything that is drawn at them.

const state = { measure: 0, a: 0, b: DATA.stepsB.length - 1, stretched: true };
let shown = null;

function between(a = state.a, b = state.b) {
  const [first, second] = DATA.twoRuns ? [`step ${DATA.stepsA[a]} of A`, `step ${DATA.stepsB[b]} of B`]
    : [`step ${DATA.stepsA[a]}`, `step ${DATA.stepsB[b]}`];
  return `${first} against ${second}`;
}

function reading(measure) {
  const [rows, columns] = [DATA.stepsA.length, DATA.stepsB.length];
  if (typeof measure.value === "string") measure.value = unpacked(measure.value, DATA.sites.length * rows * columns);
  const at = (s, a, b) => measure.value[(s * rows + a) * columns + b];
  return {
    measure, at,
    toEnd: (s, a) => at(s, a, columns - 1),
    ends: state.stretched ? measure.data : measure.full,
    curveEnds: state.stretched ? measure.ends : measure.full,
    settledDots: (s) => measure.settled.slice(0, 1).map((steps) => steps[s]).filter((k) => k !== null && k !== undefined),
  };
}

// Move the cursor, and nothing else.
function move(changes) {
  Object.assign(state, changes);
  hideTip();
  content.querySelectorAll(".curve-host, .time-map").forEach((host) => host.follow?.());
  for (const side of ["a", "b"]) {
    const slider = document.getElementById(`time-${side}`);
    if (!slider) continue;
    slider.value = state[side];
    const steps = side === "a" ? DATA.stepsA : DATA.stepsB;
    const text = `${steps[state[side]]}${state[side] === steps.length - 1 ? " (last)" : ""}`;
    slider.setAttribute("aria-valuetext", `step ${text}`);
    document.getElementById(`said-${side}`).textContent = text;
  }
  document.querySelectorAll(".between").forEach((node) => node.replaceChildren(between()));
}

function slider(side, title, steps) {
  const input = element("input", { type: "range", id: `time-${side}`, min: 0, max: steps.length - 1, step: 1, "aria-label": title });
  input.addEventListener("input", () => move({ [side]: Number(input.value) }));
  return element("div", { class: "time" }, [
    element("label", { for: `time-${side}` }, [`${title} `, element("strong", { id: `said-${side}` }, "")]), input,
  ]);
}

function show() {
  const place = scrollY;
  hideTip();
  shown = DATA.measures.length ? reading(DATA.measures[state.measure]) : null;
  content.replaceChildren(...(shown ? [tabs(DATA.measures.map(({ name }) => name), state.measure, select), panel(shown)] : [element("p", {}, "Nothing was measured.")]),
    ...(DATA.provenance.length ? [record("Provenance", DATA.provenance)] : []));
  content.querySelectorAll(".curve-host").forEach((host) => host.redraw());
  if (shown) move({});
  scrollTo({ top: place, behavior: "instant" });
}

function select(k) {
  state.measure = k;
  show();
}

function panel(found) {
  const [first, second] = DATA.twoRuns ? ["Step of A", "against step of B"] : ["Step", "against step"];
  return panelOf(state.measure, [
    meaning(found.measure),
    element("div", { class: "card times" }, [slider("a", first, DATA.stepsA), slider("b", second, DATA.stepsB)]),
    element("div", { class: "figures" }, [layersFigure(found), timeFigure(found)]),
    mapsFigure(found),
    section("Site by site", settledTable(found)),
    section("How it was measured", method(found)),
    section("Caveats", found.measure.caveats.length
      ? element("ol", { class: "caveats" }, found.measure.caveats.map((text) => element("li", {}, named(text, "words"))))
      : element("p", { class: "quiet" }, "None.")),
  ]);
}

function layersFigure(found) {
  const drawn = overLayers(found);
  return figure("All layers at one step", [element("p", { class: "quiet legends" }, [
    legend("line-depth", element("span", { class: "between" }, "")),
    legend("line-best", `against the last step, ${DATA.stepsB.at(-1)}`),
  ])], drawn, tools(downloads([DATA.names[0], found.measure.name, "layers"], () => timeTable(found, state.a), () => drawn.querySelector("svg"))));
}

function timeFigure(found) {
  const stops = Array.from({ length: 9 }, (_, k) => depthColour((k / 8) * (DATA.sites.length - 1)));
  const bar = element("span", { class: "depth-bar", "aria-hidden": "true" });
  bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  const order = DATA.byDepth ? "layer" : "by name";
  const dots = DATA.thresholds.length ? `; dots: settled at ${DATA.thresholds[0]}` : "";
  const drawn = overTime(found);
  return figure(`Nearness to the last state${DATA.twoRuns ? " of B" : ""}`, [element("p", { class: "quiet legends" },
    element("span", { class: "legend" }, [`first ${order}`, bar, `last ${order}${dots}`]))], drawn,
    tools(downloads([DATA.names[0], found.measure.name, "over-time"], () => endTable(found), () => drawn.querySelector("svg"))));
}

function mapsFigure(found) {
  const bar = redrawn(element("div", { class: "bar-host" }), (width) => {
    const grid = { clipped: found.measure.clipped, full: found.measure.full, closer: found.measure.closer, measure: found.measure.name };
    const size = Math.min(width - 2, 300);
    bar.replaceChildren(drawing(size + 2, 48, "Colour scale", colourBar(grid, found.ends, size)));
  });
  const stretch = stretchChoice((stretched) => {
    state.stretched = stretched;
    show();
    document.getElementById("stretch").focus({ preventScroll: true });
  });
  const lines = DATA.thresholds.map((threshold, k) => legend(`settled-key level-${k}`, `settled at ${threshold}`));
  const why = found.measure.caveats.length ? "; the caveats say why" : "";
  const note = `Bright is alike. Time runs down${DATA.twoRuns ? " for A and to the right for B" : " and to the right"}; ` +
    "recorded steps are evenly spaced. Click a map to move both sliders." +
    (found.measure.value.includes(null) ? ` Hatched: undefined${why}.` : "");
  const notes = [element("p", { class: "key-note quiet" }, note), lines.length ? element("p", { class: "quiet legends" }, lines) : null];
  return figure("Every step against every other", notes, bar,
    element("div", { class: "time-maps" }, DATA.sites.map((_, s) => timeMap(found, s))),
    tools(stretch, downloads([DATA.names[0], found.measure.name, "maps"],
      () => [timeTable(found, 0)[0], ...DATA.stepsA.flatMap((_, a) => timeTable(found, a).slice(1))], () => mapsDrawing(found))));
}

// The values that a figure draws: of all layers at one step, and of each step with the last.
function timeTable(found, a) {
  return [["site", "step_a", "step_b", "value"],
    ...DATA.sites.flatMap((site, s) => DATA.stepsB.map((step, b) => [site, DATA.stepsA[a], step, found.at(s, a, b)]))];
}

function endTable(found) {
  return [["site", "step", "value"], ...DATA.sites.flatMap((site, s) => DATA.stepsA.map((step, k) => [site, step, found.toEnd(s, k)]))];
}

function settledTable(found) {
  const first = (s) => found.toEnd(s, 0);
  const settled = (s, k) => found.measure.settled[k][s];
  return sortable([
    { title: DATA.byDepth ? "Depth" : "Place", number: true, key: (s) => s, cell: (s) => String(s + 1) },
    { title: "Site", key: (s) => s, cell: (s) => named(DATA.sites[s]) },
    { title: "At the first step", number: true, key: first, cell: (s) => written(first(s), 3) },
    ...(DATA.twoRuns ? [{
      title: "At the last step", number: true, key: (s) => found.toEnd(s, DATA.stepsA.length - 1),
      cell: (s) => written(found.toEnd(s, DATA.stepsA.length - 1), 3),
    }] : []),
    ...DATA.thresholds.map((threshold, k) => ({
      title: `Settled at ${threshold}`, number: true, key: (s) => settled(s, k),
      cell: (s) => (settled(s, k) === null ? "later" : String(DATA.stepsA[settled(s, k)])),
    })),
  ], DATA.sites.map((_, s) => s), "When each site settles");
}

function method({ measure }) {
  const steps = `${DATA.stepsA.length} recorded step${DATA.stepsA.length === 1 ? "" : "s"}`;
  return factList([
    ["What", `${DATA.what}, ${steps}${DATA.twoRuns ? ` of A, ${DATA.stepsB.length} of B` : ""}`],
    ["Statistic", measure.statistic],
    ...readingFacts(measure),
    ...(measure.rule ? [["Settled", measure.rule]] : []),
  ]);
}

show();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
