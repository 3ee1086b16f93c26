// The page: two times that are moved through, and everything drawn at them.

const content = document.getElementById("content");
const state = { measure: 0, a: 0, b: DATA.stepsB.length - 1, stretched: true };
let shown = null;

function section(title, ...children) {
  return element("section", { class: "card" }, [element("h3", {}, title), ...children]);
}

function between(a = state.a, b = state.b) {
  const [one, other] = DATA.twoRuns ? [`step ${DATA.stepsA[a]} of A`, `step ${DATA.stepsB[b]} of B`]
    : [`step ${DATA.stepsA[a]}`, `step ${DATA.stepsB[b]}`];
  return `${one} against ${other}`;
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
  content.replaceChildren(...(shown ? [tabs(), panel(shown)] : [element("p", {}, "Nothing was measured.")]),
    ...[provenance()].filter(Boolean));
  content.querySelectorAll(".curve-host").forEach((host) => host.redraw());
  if (shown) move({});
  scrollTo({ top: place, behavior: "instant" });
}

function tabs() {
  const select = (k) => {
    state.measure = (k + DATA.measures.length) % DATA.measures.length;
    show();
    document.getElementById(`tab-${state.measure}`).focus({ preventScroll: true });
  };
  return element("div", { class: "tabs", role: "tablist", "aria-label": "Measures" }, DATA.measures.map(({ name }, k) =>
    element("button", {
      type: "button", role: "tab", id: `tab-${k}`, "aria-selected": String(k === state.measure), "aria-controls": "panel",
      tabindex: k === state.measure ? 0 : -1, click: () => select(k),
      keydown: (event) => {
        if (event.key === "ArrowRight") select(k + 1);
        if (event.key === "ArrowLeft") select(k - 1);
      },
    }, named(name))));
}

function panel(found) {
  const [one, other] = DATA.twoRuns ? ["Step of A", "against step of B"] : ["Step", "against step"];
  return element("div", { class: "panel", role: "tabpanel", id: "panel", "aria-labelledby": `tab-${state.measure}` }, [
    element("div", { class: "card times" }, [slider("a", one, DATA.stepsA), slider("b", other, DATA.stepsB)]),
    element("div", { class: "figures" }, [layersFigure(found), timeFigure(found)]),
    mapsFigure(found),
    section("Site by site", settledTable(found)),
    section("How it was measured", method(found)),
    section("Caveats", found.measure.caveats.length
      ? element("ol", { class: "caveats" }, found.measure.caveats.map((text) => element("li", {}, named(text, "words"))))
      : element("p", { class: "quiet" }, "None.")),
  ]);
}

function legend(className, text) {
  return element("span", { class: `legend ${className}` }, [element("span", { class: "key" }, ""), text]);
}

function layersFigure(found) {
  return element("figure", { class: "card" }, [
    element("figcaption", {}, [element("h3", {}, "All layers at one step"), element("p", { class: "quiet legends" }, [
      legend("line-depth", element("span", { class: "between" }, "")),
      legend("line-best", `against the last step, ${DATA.stepsB.at(-1)}`),
    ])]),
    overLayers(found),
  ]);
}

function timeFigure(found) {
  const stops = Array.from({ length: 9 }, (_, k) => depthColour((k / 8) * (DATA.sites.length - 1)));
  const bar = element("span", { class: "depth-bar", "aria-hidden": "true" });
  bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  const order = DATA.byDepth ? "layer" : "by name";
  const dots = DATA.thresholds.length ? `; dots: settled at ${DATA.thresholds[0]}` : "";
  return element("figure", { class: "card" }, [
    element("figcaption", {}, [element("h3", {}, `Nearness to the last state${DATA.twoRuns ? " of B" : ""}`),
      element("p", { class: "quiet legends" }, [element("span", { class: "legend" }, [`first ${order}`, bar, `last ${order}${dots}`])])]),
    overTime(found),
  ]);
}

function mapsFigure(found) {
  const bar = redrawn(element("div", { class: "bar-host" }), (width) => {
    const grid = { clipped: found.measure.clipped, full: found.measure.full, closer: found.measure.closer, measure: found.measure.name };
    const size = Math.min(width - 2, 300);
    bar.replaceChildren(shape("svg", { width: size + 2, height: 48, role: "img", "aria-label": "Colour scale" }, colourBar(grid, found.ends, size)));
  });
  const stretch = element("input", { id: "stretch", type: "checkbox", change: (event) => {
    state.stretched = event.target.checked;
    show();
    document.getElementById("stretch").focus({ preventScroll: true });
  } });
  stretch.checked = state.stretched;
  const lines = DATA.thresholds.map((threshold, k) => legend(`settled-key level-${k}`, `settled at ${threshold}`));
  const why = found.measure.caveats.length ? "; the caveats say why" : "";
  const note = `Bright is alike. Time runs down${DATA.twoRuns ? " for A and to the right for B" : " and to the right"}; ` +
    "recorded steps are evenly spaced. Click a map to move both sliders." +
    (found.measure.value.includes(null) ? ` Hatched: undefined${why}.` : "");
  return element("figure", { class: "card maps" }, [
    element("figcaption", {}, [element("h3", {}, "Every step against every other"), element("p", { class: "key-note quiet" }, note),
      lines.length ? element("p", { class: "quiet legends" }, lines) : null]),
    bar,
    element("div", { class: "time-maps" }, DATA.sites.map((_, s) => timeMap(found, s))),
    element("div", { class: "tools" }, element("label", { class: "choice" }, [stretch, " Stretch to the values found"])),
  ]);
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
      cell: (s) => (settled(s, k) === null ? "never" : String(DATA.stepsA[settled(s, k)])),
    })),
  ], DATA.sites.map((_, s) => s), "When each site settles");
}

function method({ measure }) {
  const facts = [
    ["What", `${DATA.what}, ${DATA.stepsA.length} recorded step${DATA.stepsA.length === 1 ? "" : "s"}${DATA.twoRuns ? ` of A, ${DATA.stepsB.length} of B` : ""}`],
    ["Statistic", measure.statistic],
    ["Range", measure.extent],
    ["Direction", measure.same === null ? measure.direction
      : `${measure.direction}; anything compared with itself has ${Number(measure.same.toPrecision(4))}`],
    ...(measure.rule ? [["Settled", measure.rule]] : []),
  ];
  return element("dl", { class: "facts" }, facts.flatMap(([term, text]) => [
    element("dt", {}, term), element("dd", {}, named(text, "words")),
  ]));
}

function provenance() {
  if (!DATA.provenance.length) return null;
  const rows = DATA.provenance.map(([key, text]) =>
    element("tr", {}, [element("th", { scope: "row" }, named(key)), element("td", {}, named(text, "words"))]));
  return element("details", { class: "card", open: "" }, [
    element("summary", {}, element("h3", {}, "Provenance")),
    element("div", { class: "scroll" }, element("table", { class: "provenance" }, element("tbody", {}, rows))),
  ]);
}

show();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
