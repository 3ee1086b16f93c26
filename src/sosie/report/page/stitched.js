// Stitched networks: their performance, beside indices of the layers at which they are joined.

const MOST_INDICES = 3; // distinguishable lines

function stitched(pair) {
  if (!pair.stitched || !pair.stitched.says.length) return null;
  const does = reading(pair, pair.measures[pair.stitched.does]);
  const says = pair.stitched.says.slice(0, MOST_INDICES).map((k) => reading(pair, pair.measures[k]));
  const note = `What the stitched network does (${does.measure.name}${does.hasRange ? ", shaded: 95 % interval" : ""}), ` +
    "and what the index says of the two layers before they are joined.";
  const lines = (readings, first) => readings.map(({ measure }, k) => legend(lineClass(first + k), named(measure.name)));
  const quiet = (className, words) => element("p", { class: `quiet ${className}` }, words);
  return element("div", { class: "figures stitched" }, [
    figure("Along the layers", [quiet("", note), quiet("legends", lines([does, ...says], 0))], stitchedLines(does, says)),
    figure("Does the index tell?", [quiet("", question(does)), quiet("legends dots", lines(says, 1))], scatter(does, says)),
  ]);
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

// At least from 0 to 1, wider if values lie beyond.
function unitEnds(numbers) {
  const known = numbers.filter((value) => value !== null);
  return [Math.min(0, ...known), Math.max(1, ...known)];
}

function stitchedLines(does, says) {
  const all = [does, ...says];
  const at = (found, kind) => (i) => found.at(kind, i, does.measure.partner[i]);
  const held = all.flatMap((found) => does.a.sites.flatMap((_, i) => ["value", "low", "high"].map((kind) => at(found, kind)(i))));
  return layerCurve(does, unitEnds(held), {
    axis: "", foot: "layers of A →", describe: (_, i) => describePair(all, i, does.measure.partner[i]),
    lines: (plan) => [
      does.hasRange ? ribbon(plan, at(does, "low"), at(does, "high"), lineClass(0)) : null,
      ...all.map((found, k) => line(plan, at(found, "value"), lineClass(k))),
      nothingDrawn(plan, all.flatMap((found) => does.a.sites.map((_, i) => at(found, "value")(i)))),
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
  const columns = does.b.sites.length;
  const pairs = does.measure.value.flatMap((value, k) => (value === null ? [] : [[Math.floor(k / columns), k % columns]]));
  const ends = unitEnds(pairs.map(([i, j]) => does.at("value", i, j)));
  const reach = unitEnds(says.flatMap((found) => pairs.map(([i, j]) => found.at("value", i, j))));
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
