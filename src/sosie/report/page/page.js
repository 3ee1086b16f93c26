// The page: which pair and measure are shown, and everything about them.

const state = { pair: 0, measure: 0, stretched: false, calibrated: false, cell: null };
const content = document.getElementById("content");
const many = DATA.names.length > 0;

function section(title, ...children) {
  return element("section", { class: "card" }, [element("h3", {}, title), ...children]);
}

// A reader who ticks a box stays where they are: same place, same focus.
function change(changes) {
  const [place, focused] = [scrollY, document.activeElement?.id];
  Object.assign(state, changes);
  hideTip();
  show([state.measure]);
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  scrollTo({ top: place, behavior: "instant" });
}

function show(measures) {
  const pair = DATA.pairs[state.pair];
  content.replaceChildren(...[stitched(pair), tabs(pair), ...measures.map((k) => panel(pair, k)), provenance(pair)].filter(Boolean));
  content.querySelectorAll(".map, .curve-host").forEach((host) => host.redraw());
}

// Arrow keys move between tabs, as the pattern for tabs asks.
function tabs(pair) {
  const select = (k) => {
    const wanted = (k + pair.measures.length) % pair.measures.length;
    change({ measure: wanted });
    document.getElementById(`tab-${wanted}`).focus();
  };
  return element("div", { class: "tabs", role: "tablist", "aria-label": "Measures" }, pair.measures.map(({ name }, k) =>
    element("button", {
      type: "button", role: "tab", id: `tab-${k}`, "aria-selected": String(k === state.measure),
      "aria-controls": `panel-${k}`, tabindex: k === state.measure ? 0 : -1,
      click: () => select(k),
      keydown: (event) => {
        if (event.key === "ArrowRight") select(k + 1);
        if (event.key === "ArrowLeft") select(k - 1);
      },
    }, named(name))));
}

function panel(pair, k) {
  const measure = pair.measures[k];
  if (!measure) return element("p", {}, "Nothing was measured.");
  if (pair.transfer) return transferPanel(pair, k);
  const found = reading(pair, measure);
  return element("div", { role: "tabpanel", id: `panel-${k}`, "aria-labelledby": `tab-${k}`, class: "panel" }, [
    element("h2", { class: "print-only" }, named(measure.name)),
    ...(many ? models(pair, measure) : []),
    element("div", { class: wide(found) || pair.inOrder ? "figures wide" : "figures" }, [
      pair.inOrder ? null : mapFigure(found),
      element("div", { class: "stack" }, [curveFigure(found), section("How it was measured", method(found))]),
    ]),
    section(pair.shifted ? "Shift by shift" : "Layer by layer", table(found)),
    section("Caveats", caveats(found)),
  ]);
}

// A map much wider than high takes the whole width.
function wide({ a, b }) {
  return b.sites.length > 12 && b.sites.length > 1.7 * a.sites.length;
}

function mapFigure(found) {
  const kept = pinned(found);
  const map = heatmap(gridOf(found, kept.choose));
  const drawing = () => map.querySelector("svg");
  const stretch = element("label", { class: "choice" }, [
    element("input", { id: "stretch", type: "checkbox" }),
    " Stretch to the values found",
  ]);
  stretch.addEventListener("change", (event) => change({ stretched: event.target.checked }));
  stretch.firstChild.checked = state.stretched;
  const buttons = [
    ["CSV", () => save(new Blob([csv(found)], { type: "text/csv" }), fileName(found, "csv"))],
    ["SVG", () => saveSvg(drawing(), fileName(found, "svg"))],
    ["PNG", () => savePng(drawing(), fileName(found, "png"))],
  ].map(([name, click]) =>
    element("button", { type: "button", class: "plain", click, title: `Download ${name}` }, name));
  return element("figure", { class: "card" }, [
    element("figcaption", {}, [element("h3", {}, found.pair.shifted ? "Every pair of shifts" : "Every pair of layers"), key(found)]),
    found.measure.calibrated ? scaleChoice() : null,
    map,
    kept.host,
    element("div", { class: "tools" }, [stretch, element("span", { class: "downloads" }, ["Download ", ...buttons])]),
  ]);
}

// Draw what was measured, or where it lies between chance and the same.
function scaleChoice() {
  const choice = (id, title, calibrated) => {
    const input = element("input", { id, type: "radio", name: "drawn", change: () => change({ calibrated }) });
    input.checked = state.calibrated === calibrated;
    return element("label", { class: "choice" }, [input, title]);
  };
  return element("div", { class: "switch", role: "radiogroup", "aria-label": "What the map and the curve show" }, [
    choice("drawn-value", "Value", false),
    choice("drawn-score", "Score (0 chance, 1 same)", true),
  ]);
}

function curveFigure(found) {
  const title = found.measure.null_spread ? "by chance, ± spread" : "by chance";
  const chance = found.measure.null ? [{ title, className: "line-chance" }] : [];
  const legend = [...linesOf(found), ...chance].map(({ title, className }) =>
    element("span", { class: `legend ${className}` }, [element("span", { class: "key" }, ""), title]));
  const shade = found.hasRange ? "shaded: 95 % interval" : "";
  return element("figure", { class: "card" }, [
    element("figcaption", {}, [
      element("h3", {}, found.pair.shifted ? "Both under the same shift" : "From the first layer to the last"),
      element("p", { class: "quiet legends" }, [...legend, shade]),
    ]),
    curve(found),
  ]);
}

// Several models: a matrix of all of them on top, in which a pair is picked.
function models(pair, measure) {
  const found = DATA.models.find(({ name }) => name === measure.name);
  const open = (i, j) => {
    const k = DATA.pairs.findIndex((other) => other.i === Math.min(i, j) && other.j === Math.max(i, j));
    if (k >= 0) change({ pair: k, cell: null });
  };
  const options = DATA.pairs.map(({ title }, k) => element("option", { value: k }, title));
  const picker = element("select", { id: "picker" }, options);
  picker.addEventListener("change", () => change({ pair: Number(picker.value), cell: null }));
  picker.value = state.pair;
  return [element("div", { class: "figures" }, [
    found ? element("figure", { class: "card models" }, [
      element("figcaption", {}, [element("h3", {}, "Every pair of models"), element("p", { class: "quiet" },
        `Mean of ${measure.name} over layers at the same depth. Bright is alike. Click a cell to see that pair.`)]),
      heatmap(modelGrid(found, open, pair)),
    ]) : null,
    element("section", { class: "card picked" }, [
      element("label", { class: "choice quiet" }, ["Pair ", picker]),
      element("h2", {}, named(pair.title, "words")),
      ...pair.measures.map((other) => element("p", { class: other === measure ? "lead" : "quiet" }, other.sentence)),
    ]),
  ])];
}

function modelGrid(found, open, pair) {
  const [names, size] = [DATA.names, DATA.names.length];
  unpack(found, size * size);
  const at = (i, j) => found.value[i * size + j];
  const told = (i, j) => (i === j ? "the model itself" : "mean over layers at the same depth");
  return {
    rows: names, columns: names, rowTitle: "Models", columnTitle: "Models", measure: found.name,
    value: found.value,
    best: names.map((_, i) => ({ [pair.i]: pair.j, [pair.j]: pair.i })[i] ?? null),
    ends: state.stretched ? found.data : found.full, full: found.full, clipped: found.clipped, closer: found.closer,
    label: `Heat map of ${found.name} between models. Arrow keys move from cell to cell, Enter opens a pair.`,
    describe: (i, j) => [
      tipValue(written(at(i, j))),
      element("p", {}, [named(names[i]), " and ", named(names[j])]),
      element("p", { class: "quiet" }, told(i, j)),
    ],
    say: (i, j) => `${names[i]} and ${names[j]}: ${written(at(i, j))}, ${told(i, j)}`,
    choose: open,
  };
}

if (DATA.pairs.length) show([0]);
// Paper has no tabs: print every measure, one after the other.
addEventListener("beforeprint", () => DATA.pairs.length && show(DATA.pairs[state.pair].measures.map((_, k) => k)));
addEventListener("afterprint", () => change({}));
