// One site on each side, as for outputs: one table of all measures, each drawn between chance and a model with itself.

const TRACK = 150; // px

function isSingle(pair) {
  return !pair.transfer && [pair.a, pair.b].every((side) => DATA.sides[side].sites.length === 1);
}

function single(pair) {
  const all = pair.measures.map((measure) => reading(pair, measure));
  const some = (kind) => all.some(({ measure }) => measure[kind]);
  const caveats = [...new Set(all.flatMap((found) => found.notes(0, 0)))];
  const at = (kind) => (k) => all[k].at(kind, 0, 0);
  const numbers = (k) => all[k].notes(0, 0).map((text) => caveats.indexOf(text) + 1);
  const columns = [
    { title: "Measure", key: (k) => k, cell: (k) => measureCell(all[k].measure) },
    { title: "Value", key: at("value"), number: true, cell: (k) => valueCell(all[k]) },
    { title: some("null") ? "Chance … same" : "Unlike … same", key: at(some("null") ? "score" : "value"), cell: (k) => track(all[k]) },
    { title: "95 % interval", key: at("low"), number: true, hidden: !(some("low") && some("high")), cell: (k) => rangeAt(all[k], 0, 0, 3) },
    { title: "Chance", key: at("null"), number: true, hidden: !some("null"), cell: (k) => chanceAt(all[k], 0, 0, 3) },
    { title: "p", key: at("p"), number: true, hidden: !some("p"), cell: (k) => (at("p")(k) === null ? "" : writtenP(at("p")(k), all[k].measure.pFloor)) },
    { title: "Caveats", key: (k) => numbers(k).length, hidden: !caveats.length, cell: (k) => numbers(k).join(", ") },
  ].filter(({ hidden }) => !hidden);
  const note = `Each bar goes from ${some("null") ? "what chance gives" : "the unlike end of the scale"} (left) to what a model has with itself (right).` +
    (some("low") ? " Shaded: 95 % interval." : "");
  const { measure } = all[0];
  return [
    section("Measure by measure",
      element("div", { class: "single" }, sortable(columns, all.map((_, k) => k), "Measures")),
      element("p", { class: "quiet table-note" }, note),
      tools(downloads([all[0].a.name, all[0].b.name, "measures"], () => singleTable(all)))),
    section("How it was measured", factList([
      ["Statistic", [...new Set(all.map((found) => found.measure.statistic))].join("; ")], measure.counted,
      ...(some("null") ? [["Chance", `what ${pair.chance}: mean ± spread`]] : []),
    ])),
    section("Caveats", caveats.length
      ? element("ol", { class: "caveats" }, caveats.map((text) => element("li", {}, named(text, "words"))))
      : element("p", { class: "quiet" }, "None.")),
  ];
}

function measureCell(measure) {
  return element("div", {}, [
    named(measure.name), meaning(measure), element("p", { class: "quiet about-range" }, `${measure.extent}; ${measure.direction}`),
  ]);
}

function valueCell(found) {
  const text = written(found.at("value", 0, 0), 3);
  return isByChance(found, 0, 0) ? element("span", { class: "unclear", title: NOT_CLEAR }, [text, element("small", {}, " n.s.")])
    : element("strong", {}, text);
}

// The value and its interval on a line from chance, or the unlike end, to the value of a model with itself.
function track(found) {
  const { measure } = found;
  const value = found.at("value", 0, 0);
  if (value === null) return "";
  const [far, alike] = [found.at("null", 0, 0) ?? measure.full[0], measure.same ?? measure.full[1]];
  const x = (number) => 6 + (TRACK - 12) * clamp((number - far) / (alike - far || 1), 0, 1);
  const [low, high] = [found.at("low", 0, 0), found.at("high", 0, 0)];
  const label = `${measure.name}: ${written(value, 3)}, from ${written(far, 3)} to ${written(alike, 3)}`;
  return drawing(TRACK, 20, label, [
    shape("title", {}, label),
    shape("line", { class: "track", x1: 6, x2: TRACK - 6, y1: 10, y2: 10 }),
    ...[6, TRACK - 6].map((end) => shape("line", { class: "track", x1: end, x2: end, y1: 5, y2: 15 })),
    low === null || high === null ? null
      : shape("line", { class: "track-range", x1: Math.min(x(low), x(high)) - 1, x2: Math.max(x(low), x(high)) + 1, y1: 10, y2: 10 }),
    shape("circle", { class: "track-dot", cx: x(value), cy: 10, r: 4 }),
  ]);
}

function singleTable(all) {
  const kinds = [...KINDS, "score"].filter((kind) => all.some(({ measure }) => measure[kind]));
  return [["measure", ...kinds, "caveats"],
    ...all.map((found) => [found.measure.name, ...kinds.map((kind) => found.at(kind, 0, 0)), found.notes(0, 0).join("; ")])];
}
