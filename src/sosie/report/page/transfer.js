// How much a model has to adapt to data: its scores layer by layer, and several models beside each other.

const RANKED_BY = "mean_embedding"; // the smallest first: least to adapt

function transferPanel(pair, k) {
  const found = reading(pair, pair.measures[k]);
  return panelOf(k, [
    element("h2", { class: "print-only" }, named(found.measure.name)),
    many ? section("Models, least to adapt first", modelScores(pair)) : null,
    many ? element("h2", {}, named(pair.title, "words")) : null,
    element("div", { class: "figures wide" }, [element("div", { class: "stack" }, [
      scoreFigure(found), section("How it was measured", scoreMethod(found, pair.transfer[k])),
    ])]),
    section("Layers, least to adapt first", layerScores(pair)),
    section("Caveats", caveats(found)),
  ]);
}

function short(value) {
  if (value === null) return "undefined";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) return value.toExponential(2);
  return size < 1000 ? value.toPrecision(3) : Number(value.toPrecision(3)).toLocaleString("en");
}

function readings(pair) {
  return pair.measures.map((measure) => reading(pair, measure));
}

// Positions, the smallest score first and undefined ones last.
function ranks(values) {
  const places = new Array(values.length);
  sorted(values.map((_, i) => i), (i) => values[i], false).forEach((i, rank) => (places[i] = rank + 1));
  return places;
}

// A line for each of so many things, with its rank and scores; value(m, k) is the score m of thing k.
function scoreTable(label, count, { title, cell, measures, value, about = () => null }) {
  const things = Array.from({ length: count }, (_, k) => k);
  const ranked = measures.findIndex(({ name }) => name === RANKED_BY);
  const rank = ranks(things.map((k) => value(ranked, k)));
  const columns = [
    { title: "Rank", key: (k) => rank[k], cell: (k) => String(rank[k]), number: true },
    { title, key: (k) => k, cell },
    ...measures.map(({ name }, m) => ({
      title: name.replaceAll("_", " "), number: true, key: (k) => value(m, k),
      cell: (k) => element("span", { title: about(m, k) }, short(value(m, k))),
    })),
  ];
  return element("div", { class: "scores" }, sortable(columns, sorted(things, (k) => rank[k], false), label));
}

function layerScores(pair) {
  const all = readings(pair);
  return scoreTable("Scores by layer", all[0].a.sites.length, {
    title: "Layer", cell: (i) => named(all[0].a.sites[i]), measures: pair.measures,
    value: (m, i) => all[m].at("value", i, 0), about: (m, i) => scoreRange(all[m], i) || null,
  });
}

function scoreRange(found, i) {
  const [low, high] = [found.at("low", i, 0), found.at("high", i, 0)];
  return low === null || high === null || low === high ? "" : `${short(low)} to ${short(high)} (95 %)`;
}

// Several models: the mean of every score over a model's layers; a name opens that model below.
function modelScores(pair) {
  const mean = (found) => {
    const known = found.measure.value.filter((value) => value !== null);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  };
  const means = DATA.pairs.map((other) => readings(other).map(mean));
  const several = new Set(DATA.pairs.map(({ b }) => b)).size > 1;
  const open = (k) => element("button", {
    type: "button", class: "plain", id: `open-${k}`, click: () => change({ pair: k }),
    "aria-pressed": String(k === state.pair),
  }, named(several ? DATA.pairs[k].title : DATA.sides[DATA.pairs[k].a].name, "words"));
  return element("div", {}, [
    scoreTable("Mean scores by model", means.length, {
      title: "Model", cell: open, measures: pair.measures, value: (m, k) => means[k][m],
    }),
    element("p", { class: "quiet table-note" }, "Means over each model’s layers. Choose a model to see its layers below."),
  ]);
}

function scoreFigure(found) {
  const shade = found.hasRange ? " Shaded: 95 % interval for what all rows would give." : "";
  const note = found.measure.name === RANKED_BY ? "Low is little to adapt." : "Its caveats say what it depends on.";
  const drawn = scoreCurve(found);
  const lines = () => [["site", "value", "low", "high"],
    ...found.a.sites.map((site, i) => [site, ...["value", "low", "high"].map((kind) => found.at(kind, i, 0))])];
  return figure("From the first layer to the last", [element("p", { class: "quiet" }, note + shade)], drawn,
    tools(wholeChoice("whole-curve", change), downloads(fileNames(found), lines, () => drawn.querySelector("svg"))));
}

function scoreCurve(found) {
  const at = (kind) => (i) => found.at(kind, i, 0);
  const held = found.a.sites.flatMap((_, i) => ["value", "low", "high"].map((kind) => at(kind)(i))).filter((v) => v !== null);
  const whole = found.measure.name.startsWith("log") ? endsOf(held.length ? held : [0, 1]) : endsOf([0, ...held]);
  return layerCurve(found, axisEnds(held, whole, state.whole), {
    axis: `↑ ${found.measure.name}`, foot: `${found.a.name} →`, describe: describeScores,
    lines: (plan) => [
      found.hasRange ? ribbon(plan, at("low"), at("high"), "line-depth") : null,
      line(plan, at("value"), "line-depth"),
      nothingDrawn(plan, found.measure.value),
    ],
  });
}

function describeScores(found, i) {
  const facts = readings(found.pair).flatMap((other) => {
    const between = scoreRange(other, i);
    return [[other.measure.name, short(other.at("value", i, 0)) + (between ? `, ${between}` : "")]];
  });
  return [tipSite(found.a, i), tipFacts(facts), tipNotes(found.notes(i, 0))].filter(Boolean);
}

function scoreMethod({ measure }, about) {
  return factList([
    ["What it is", about],
    ["Statistic", measure.statistic],
    measure.counted,
    ["Range", measure.extent],
    ["Ranks", "follow mean_embedding, the smallest first: the smaller it is, the less there is to adapt"],
    ["Interval", measure.low ? "95 %, for what all rows would give; not for other data" : "none: all rows were summed up"],
  ]);
}
