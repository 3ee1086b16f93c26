// How much a model has to adapt to data: its scores layer by layer, and several models beside each other.

const RANKED_BY = "mean_embedding"; // the smallest first: least to adapt

function transferPanel(pair, k) {
  const found = reading(pair, pair.measures[k]);
  return element("div", { role: "tabpanel", id: `panel-${k}`, "aria-labelledby": `tab-${k}`, class: "panel" }, [
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

function layerScores(pair) {
  const all = readings(pair);
  const layers = pair.measures[0].value.map((_, i) => i);
  const rank = ranks(layers.map((i) => all.find(({ measure }) => measure.name === RANKED_BY).at("value", i, 0)));
  const columns = [
    { title: "Rank", key: (i) => rank[i], cell: (i) => String(rank[i]), number: true },
    { title: "Layer", key: (i) => i, cell: (i) => named(all[0].a.sites[i]) },
    ...all.map((found) => ({
      title: found.measure.name.replaceAll("_", " "), number: true, key: (i) => found.at("value", i, 0),
      cell: (i) => element("span", { title: scoreRange(found, i) || null }, short(found.at("value", i, 0))),
    })),
  ];
  return element("div", { class: "scores" }, sortable(columns, sorted(layers, (i) => rank[i], false), "Scores by layer"));
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
  const rows = DATA.pairs.map((other) => ({ other, means: readings(other).map(mean) }));
  const names = pair.measures.map(({ name }) => name);
  const rank = ranks(rows.map(({ means }) => means[names.indexOf(RANKED_BY)]));
  const several = new Set(DATA.pairs.map(({ b }) => b)).size > 1;
  const open = (k) => element("button", {
    type: "button", class: "plain", id: `open-${k}`, click: () => change({ pair: k }),
    "aria-pressed": String(k === state.pair),
  }, named(several ? DATA.pairs[k].title : DATA.sides[DATA.pairs[k].a].name, "words"));
  const columns = [
    { title: "Rank", key: (k) => rank[k], cell: (k) => String(rank[k]), number: true },
    { title: "Model", key: (k) => k, cell: open },
    ...names.map((name, m) => ({
      title: name.replaceAll("_", " "), number: true, key: (k) => rows[k].means[m], cell: (k) => short(rows[k].means[m]),
    })),
  ];
  const order = sorted(rows.map((_, k) => k), (k) => rank[k], false);
  return element("div", { class: "scores" }, [
    sortable(columns, order, "Mean scores by model"),
    element("p", { class: "quiet table-note" }, "Means over each model’s layers. Choose a model to see its layers below."),
  ]);
}

function scoreFigure(found) {
  const shade = found.hasRange ? " Shaded: 95 % interval for what all rows would give." : "";
  const note = found.measure.name === RANKED_BY ? "Low is little to adapt." : "Its caveats say what it depends on.";
  return element("figure", { class: "card" }, [
    element("figcaption", {}, [
      element("h3", {}, "From the first layer to the last"), element("p", { class: "quiet" }, note + shade),
    ]),
    scoreCurve(found),
  ]);
}

function scoreCurve(found) {
  const at = (kind) => (i) => found.at(kind, i, 0);
  const held = found.a.sites.flatMap((_, i) => ["value", "low", "high"].map((kind) => at(kind)(i))).filter((v) => v !== null);
  const whole = found.measure.name.startsWith("log") ? held : [0, ...held];
  const ends = held.length ? endsOf(whole) : [0, 1];
  const host = redrawn(element("div", { class: "curve-host" }), (width) => {
    const plan = curvePlan(found, width, ends);
    const svg = shape("svg", {
      class: "curve", role: "application", tabindex: 0, width, height: plan.height, viewBox: `0 0 ${width} ${plan.height}`,
      "aria-label": `${found.measure.name} by layer of ${found.a.name}. Left and right keys move along the layers.`,
    }, [
      gridLines(plan),
      found.hasRange ? ribbon(plan, at("low"), at("high"), "line-depth") : null,
      line(plan, at("value"), "line-depth"),
      nothingDrawn(plan, found.measure.value),
      footLabels(plan.foot, { left: plan.left, top: plan.top + CURVE, pitch: plan.pitch, leaning: plan.under.leaning }),
      shape("text", { class: "label axis", x: 0, y: 12 }, `↑ ${found.measure.name}`),
      shape("text", { class: "label axis", x: plan.left, y: plan.height - 6 },
        [shape("title", {}, found.a.name), shortened(`${found.a.name} →`, width - plan.left - 8)]),
    ]);
    host.replaceChildren(svg);
    following(svg, found, plan, describeScores);
  });
  return host;
}

function describeScores(found, i) {
  const facts = readings(found.pair).flatMap((other) => {
    const between = scoreRange(other, i);
    return [[other.measure.name, short(other.at("value", i, 0)) + (between ? `, ${between}` : "")]];
  });
  return [tipSite(found.a, i), tipFacts(facts), tipNotes(found.notes(i, 0))].filter(Boolean);
}

function scoreMethod(found, about) {
  const { measure, pair } = found;
  const facts = [
    ["What it is", about],
    ["Statistic", measure.statistic],
    ["Rows", `${measure.n.toLocaleString("en")}, made by the rule “${pair.rule}”`],
    ["Range", measure.extent],
    ["Ranks", "go by mean_embedding, the smallest first: the less it is, the less there is to adapt"],
    ["Interval", measure.low ? "95 %, for what all rows would give; not for other data" : "none: all rows were summed up"],
  ];
  return element("dl", { class: "facts" }, facts.flatMap(([term, text]) => [
    element("dt", {}, term), element("dd", {}, named(text, "words")),
  ]));
}
