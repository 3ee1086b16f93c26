// Stitched networks: their performance, beside indices of the layers at which they are joined.

const MOST_INDICES = 3; // distinguishable lines

function stitched(found) {
  const { pair } = found;
  if (!pair.stitched || !pair.stitched.says.length) return null;
  const does = reading(pair, pair.measures[pair.stitched.does]);
  const says = pair.stitched.says.slice(0, MOST_INDICES).map((k) => reading(pair, pair.measures[k]));
  const lines = element("p", { class: "quiet legends" }, says.map(({ measure }, k) => legend(lineClass(k + 1), named(measure.name))));
  const quiet = (className, words) => element("p", { class: `quiet ${className}` }, words);
  const [beside, dots] = [indexLines(does, says), scatter(does, says)];
  const table = () => [["site_a", "site_b", does.measure.name, ...says.map(({ measure }) => measure.name)],
    ...stitchedPairs(does).map(([i, j]) => [does.a.sites[i], does.b.sites[j], ...[does, ...says].map((each) => each.at("value", i, j))])];
  const saved = (what, host) => downloads([does.a.name, does.b.name, what], table, () => host.querySelector("svg"));
  return element("div", { class: "figures stitched" }, [
    figure("What the index says", [quiet("", "Of the two layers, before they are joined."), lines], beside,
      tools(wholeChoice("whole-index", change), saved("index", beside))),
    figure("Does the index tell?", [quiet("", question(does)), element("div", { class: "dots" }, lines.cloneNode(true))], dots,
      tools(wholeChoice("whole-scatter", change), saved("scatter", dots))),
  ]);
}

function stitchedPairs({ measure, b }) {
  return measure.value.flatMap((value, k) => (value === null ? [] : [[Math.floor(k / b.sites.length), k % b.sites.length]]));
}

function question(does) {
  const several = does.measure.value.some((value, k) =>
    value !== null && does.measure.partner[Math.floor(k / does.b.sites.length)] !== k % does.b.sites.length);
  return "Every stitched pair of layers. If an index predicts the value of the stitched network, its dots lie on one rising line." +
    (several ? " Large dots: the same depth." : "");
}

function lineClass(k) {
  return k ? `line-index-${k}` : "line-depth";
}

function indexLines(does, says) {
  const at = (found, kind) => (i) => found.at(kind, i, does.measure.partner[i]);
  const held = says.flatMap((found) => does.a.sites.flatMap((_, i) => ["value", "low", "high"].map((kind) => at(found, kind)(i))));
  return layerCurve(does, axisEnds(held, [0, 1], state.whole), {
    axis: "↑ more alike", foot: "layers of A →", describe: (_, i) => describePair([does, ...says], i, does.measure.partner[i]),
    lines: (plan) => [
      ...says.map((found, k) => line(plan, at(found, "value"), lineClass(k + 1))),
      nothingDrawn(plan, says.flatMap((found) => does.a.sites.map((_, i) => at(found, "value")(i)))),
    ],
  });
}

function describePair(all, i, j) {
  const lines = all.map((found, k) => element("p", { class: `tip-line ${lineClass(k)}` }, [
    element("span", { class: "key" }, ""), `${found.measure.name} `, element("strong", {}, written(found.at("value", i, j), 3)),
    rangeAt(found, i, j) ? element("span", { class: "quiet" }, ` ${rangeAt(found, i, j, 3)}`) : null,
  ]));
  return [tipSite(all[0].a, i), tipSite(all[0].b, j), ...lines];
}

function scatter(does, says) {
  const pairs = stitchedPairs(does);
  const ends = axisEnds(pairs.map(([i, j]) => does.at("value", i, j)), does.measure.full, state.whole);
  const reach = axisEnds(says.flatMap((found) => pairs.map(([i, j]) => found.at("value", i, j))), [0, 1], state.whole);
  const host = redrawn(element("div", { class: "curve-host" }), (width) => {
    const ticks = ticksBetween(...ends, 5);
    const left = Math.max(44, Math.ceil(Math.max(...ticks.map(({ text }) => widthOf(text)))) + 12);
    const [top, height] = [28, CURVE + 74];
    const share = (value) => (value - reach[0]) / (reach[1] - reach[0]);
    const [x, y] = [
      (value) => left + (width - left - 12) * share(value),
      (value) => top + CURVE * (1 - (value - ends[0]) / (ends[1] - ends[0])),
    ];
    const plan = { left, width: width - 4, y, ticks };
    const under = ticksBetween(...reach, 5).map(({ value, text }) =>
      shape("text", { class: "label quiet", x: x(value), y: top + CURVE + 20, "text-anchor": anchorAt(share(value)) }, text));
    const dots = says.flatMap((found, k) => pairs.flatMap(([i, j]) => {
      const value = found.at("value", i, j);
      if (value === null) return [];
      const r = does.measure.partner[i] === j ? 4.5 : 2.5;
      const dot = shape("circle", { class: `scatter ${lineClass(k + 1)}`, cx: x(value), cy: y(does.at("value", i, j)), r });
      return [tipped(dot, () => describePair([does, ...says], i, j))];
    }));
    const axis = (place, text) => shape("text", { class: "label axis", ...place }, text);
    const indices = says.map(({ measure }) => measure.name).join(", ");
    host.replaceChildren(drawing(width, height, `${does.measure.name} against ${indices}.`, [
      gridLines(plan), ...under, ...dots, nothingDrawn(plan, dots.length ? [0] : []),
      axis({ x: 0, y: 12 }, `↑ ${does.measure.name}`),
      axis({ x: left, y: height - 6 }, shortened(`${indices} →`, width - left - 8)),
    ], { class: "curve" }));
  });
  return host;
}
