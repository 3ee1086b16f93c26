// Caveats, how it was measured, and where it came from: in words.

const SHOWN = 8; // caveats before the rest is folded away

function caveats(found) {
  const all = found.measure.caveats;
  if (!all.length) return element("p", { class: "quiet" }, "None.");
  const items = all.map(({ text, reach }) =>
    element("li", {}, [named(text, "words"), " ", element("span", { class: "quiet reach" }, reach)]));
  const list = element("ol", { class: "caveats" }, items.slice(0, SHOWN));
  if (items.length <= SHOWN) return list;
  const rest = element("ol", { class: "caveats", start: SHOWN + 1 }, items.slice(SHOWN));
  return element("div", {}, [list, element("details", {}, [
    element("summary", {}, `${items.length - SHOWN} more`), rest,
  ])]);
}

function method(found) {
  const { measure, pair } = found;
  const given = (kind, words, missing) => {
    if (measure[kind]) return words;
    return measure.dropped.includes(kind) ? "left out here to keep the page small" : missing;
  };
  const [layers, others] = pair.layers;
  return factList([
    ["Statistic", measure.statistic],
    measure.counted,
    ...readingFacts(measure),
    ["Interval", given("low", "95 %, given for each pair", "none was computed")],
    ["Chance", given("null", `what ${pair.chance}: mean ± spread, for each pair`, "not measured")],
    ...(measure.correction ? [["p", "how often chance gives a value as close; " +
      "corrected for the search: how often it gives one anywhere among the pairs"]] : []),
    ...(measure.calibrated ? [["Score", "0 is what chance gives, 1 is what anything gives when compared with itself"]] : []),
    ...(pair.shifted ? [["Same shift", "both models answer the same changed inputs; elsewhere A answers those of the row and B those of the column"]]
      : pair.inOrder ? [] : [["Same depth", `each of A’s ${layers} layers against the layer at the same relative depth among B’s ${others}`]]),
  ]);
}

function provenance(pair) {
  const lines = DATA.records[pair.provenance] ?? [];
  return lines.length ? record("Provenance", lines, lines.length <= 40) : null;
}

// What a reader must know to read the colours.
function key(found) {
  const { measure, scale } = found;
  const parts = ["Bright is alike."];
  if (found.calibrated) parts.push("Scores: 0 is what chance gives, 1 is what anything gives when compared with itself.");
  if (scale.closer === "down") parts.push("Lower values are more alike here, so the scale runs backwards.");
  if (state.stretched) parts.push("Colours and curves are stretched to the values found here.");
  else if (scale.clipped) parts.push("Values beyond the end of the scale have the colour of its end.");
  if (measure.value.includes(null)) parts.push(`Hatched cells are undefined${measure.caveats.length ? "; the caveats say why" : ""}.`);
  if (measure.best.some((j) => j !== null)) parts.push(`A frame or dot marks each row’s best match${found.calibrated ? ", by value" : ""}.`);
  const chance = chanceKey(found);
  if (chance) parts.push(chance);
  return element("p", { class: "key-note quiet" }, parts.join(" "));
}
