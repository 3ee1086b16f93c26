// One measure of one pair of models, as the figures read it.

function reading(pair, measure) {
  const a = DATA.sides[pair.a];
  const b = DATA.sides[pair.b];
  unpack(measure, a.sites.length * b.sites.length);
  const at = (kind, i, j) => (j === null || !measure[kind] ? null : measure[kind][i * b.sites.length + j]);
  const places = measure.caveats.map(({ where }) => new Set(where.map(([i, j]) => `${i ?? "*"} ${j ?? "*"}`)));
  const concerns = (k, i, j) =>
    measure.caveats[k].all || [`${i} ${j}`, `${i} *`, `* ${j}`, "* *"].some((key) => places[k].has(key));
  const numbers = (i, j) => (j === null ? [] : measure.caveats.map((_, k) => k).filter((k) => concerns(k, i, j)));
  const notes = (i, j) => numbers(i, j).map((k) => measure.caveats[k].text);
  const calibrated = Boolean(state.calibrated && measure.calibrated);
  const scale = calibrated ? measure.calibrated : measure; // how to read the drawn numbers
  const ends = state.stretched ? scale.data : scale.full;
  return {
    pair, measure, a, b, at, numbers, notes, calibrated, scale, ends, hasRange: Boolean(measure.low && measure.high),
  };
}

function rangeAt(found, i, j, digits = 4) {
  const [low, high] = [found.at("low", i, j), found.at("high", i, j)];
  return low === null || high === null ? "" : range(low, high, digits);
}

function gridOf(found, choose) {
  const { a, b, measure, scale } = found;
  const drawn = found.calibrated ? `score of ${measure.name}` : measure.name;
  return {
    rows: a.sites, columns: b.sites, rowTitle: `A · ${a.name}`, columnTitle: `B · ${b.name}`,
    measure: drawn, value: found.calibrated ? measure.score : measure.value, best: measure.best, ends: found.ends,
    full: scale.full, clipped: scale.clipped, closer: scale.closer,
    byChance: chanceCount(found) ? (i, j) => isByChance(found, i, j) : null,
    label: `Heat map of ${drawn}: rows are ${found.pair.shifted ? "shifts" : "layers"} of ${a.name}, columns of ${b.name}. ` +
      "Arrow keys move from cell to cell, Enter keeps a cell’s numbers below.",
    choose,
    describe: (i, j) => describeCell(found, i, j),
    say: (i, j) => {
      const between = rangeAt(found, i, j);
      const value = written(found.at("value", i, j));
      return `${a.sites[i]} and ${b.sites[j]}: ${value}${between ? `, between ${between}` : ""}` +
        `${chanceInWords(found, i, j).map((said) => `, ${said}`).join("")}. ` +
        found.notes(i, j).join(" ");
    },
  };
}

function describeCell(found, i, j) {
  const { a, b, measure } = found;
  const value = found.at("value", i, j);
  const between = rangeAt(found, i, j);
  const remarks = [];
  if (measure.best[i] === j) remarks.push("best match of this row");
  if (measure.partner[i] === j) remarks.push(found.pair.shifted ? "same shift" : "same depth");
  const notes = found.notes(i, j);
  if (value === null && !notes.length) notes.push("Undefined; no reason was recorded.");
  return [
    tipValue(written(value), between && `${between} (95 %)`),
    tipFacts(chanceFacts(found, i, j)),
    isByChance(found, i, j) ? element("p", { class: "verdict" }, NOT_CLEAR) : null,
    tipSite(a, i),
    tipSite(b, j),
    remarks.length ? element("p", { class: "quiet" }, remarks.join(" · ")) : null,
    tipNotes(notes),
  ].filter(Boolean);
}

function mapTable(found) {
  const kinds = [...KINDS, "score"].filter((kind) => found.measure[kind]);
  return [["site_a", "site_b", ...kinds, "caveats"], ...found.a.sites.flatMap((siteA, i) => found.b.sites.map((siteB, j) =>
    [siteA, siteB, ...kinds.map((kind) => found.at(kind, i, j)), found.notes(i, j).join("; ")]))];
}

function fileNames(found, ...more) {
  return [found.a.name, found.b.name, found.measure.name, ...more];
}
