// The page: the choice of pair and measure, and everything about them.

const state = { pair: 0, measure: 0, stretched: false, whole: false, calibrated: false, cell: null };
const many = DATA.names.length > 0;

// Ticking a box keeps the scroll position and the focus.
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
  content.replaceChildren(...[isSingle(pair) && !many ? null : measureTabs(pair), ...(isSingle(pair) ? measures.slice(0, 1) : measures).map((k) => panel(pair, k)), provenance(pair)].filter(Boolean));
  content.querySelectorAll(".map, .curve-host").forEach((host) => host.redraw());
}

function measureTabs(pair) {
  return tabs(pair.measures.map(({ name }) => name), state.measure, (k) => change({ measure: k }));
}

function panel(pair, k) {
  const measure = pair.measures[k];
  if (!measure) return element("p", {}, "Nothing was measured.");
  if (pair.transfer) return transferPanel(pair, k);
  const found = reading(pair, measure);
  if (isSingle(pair)) return panelOf(k, [...(many ? models(pair, measure) : []), ...single(pair)]);
  return panelOf(k, [
    element("h2", { class: "print-only" }, named(measure.name)),
    meaning(measure),
    ...(many ? models(pair, measure) : []),
    element("div", { class: wide(found) || pair.inOrder ? "figures wide" : "figures" }, [
      pair.inOrder ? null : mapFigure(found),
      element("div", { class: "stack" }, [curveFigure(found), section("How it was measured", method(found))]),
    ]),
    stitched(found),
    section(pair.shifted ? "Shift by shift" : "Layer by layer", table(found)),
    section("Caveats", caveats(found)),
  ]);
}

// A map much wider than high fills the whole width.
function wide({ a, b }) {
  return b.sites.length > 12 && b.sites.length > 1.7 * a.sites.length;
}

function mapFigure(found) {
  const kept = pinned(found);
  const map = heatmap(gridOf(found, kept.choose));
  // Draw the values, or the calibrated scores.
  const scale = choices("drawn", "What the map and the curve show",
    [["value", "Value"], ["score", "Score (0 chance, 1 same)"]], state.calibrated ? "score" : "value",
    (drawn) => change({ calibrated: drawn === "score" }));
  return figure(found.pair.shifted ? "Every pair of shifts" : "Every pair of layers", [key(found)],
    found.measure.calibrated ? scale : null,
    map,
    kept.host,
    tools(stretchChoice((stretched) => change({ stretched })),
      downloads(fileNames(found), () => mapTable(found), () => map.querySelector("svg"))));
}

function curveFigure(found) {
  const title = found.measure.null_spread ? "by chance, ± spread" : "by chance";
  const far = chanceIsFar(found); // the whole range shows it
  const chance = found.measure.null ? [{ title: far ? "chance is far off: see the whole range" : title, className: "line-chance" }] : [];
  const legends = [...linesOf(found), ...ownOf(found), ...chance].map((each) => legend(each.className, named(each.title, "words")));
  const drawn = curve(found);
  return figure(found.pair.shifted ? "Both under the same shift" : "From the first layer to the last",
    [element("p", { class: "quiet legends" }, [...legends, found.hasRange ? "shaded: 95 % interval" : ""])], drawn,
    tools(wholeChoice("whole-curve", change), downloads(fileNames(found, "curve"), () => curveTable(found), () => drawn.querySelector("svg"))));
}

// Several models: a matrix of all of them at the top, to choose a pair.
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
  const drawn = found ? heatmap(modelGrid(found, open, pair)) : null;
  return [element("div", { class: "figures" }, [
    found ? element("figure", { class: "card models" }, [
      element("figcaption", {}, [element("h3", {}, "Every pair of models"), element("p", { class: "quiet" },
        `${measure.name}, ${valueOf(pair)}. Bright is alike. Click a cell to see that pair.`)]),
      drawn, tools(stretchChoice((stretched) => change({ stretched }), "stretch-models"),
        downloads(["models", measure.name], () => modelTable(found), () => drawn.querySelector("svg"))),
    ]) : null,
    element("section", { class: "card picked" }, [
      element("label", { class: "choice quiet" }, ["Pair ", picker]),
      element("h2", {}, named(pair.title, "words")),
      ...pair.measures.map((other) => element("p", { class: other === measure ? "lead" : "quiet" }, other.sentence)),
    ]),
  ])];
}

// What stands for a pair of models.
function valueOf(pair) {
  return isSingle(pair) ? "the value of the pair" : `mean over ${pair.shifted ? "shifts" : "layers at the same depth"}`;
}

function modelTable({ value }) {
  const names = DATA.names;
  return [["model_a", "model_b", "value"], ...names.flatMap((a, i) => names.map((b, j) => [a, b, value[i * names.length + j]]))];
}

function modelGrid(found, open, pair) {
  const [names, size] = [DATA.names, DATA.names.length];
  unpack(found, size * size);
  const at = (i, j) => found.value[i * size + j];
  const told = (i, j) => (i === j ? "the model itself" : valueOf(pair));
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
