// The table that ranks the measures, and tables of each stage.

const entries = DATA.entries;
const KINDS = Object.keys(DATA.kinds);
const GROUPS = Object.keys(DATA.groups);

function about(note) {
  return element("p", { class: "quiet about" }, note);
}

function small(value, digits = 2) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size >= 1000) return value.toExponential(0);
  if (size < 0.5 * 10 ** -digits) return (0).toFixed(digits);
  return size >= 100 ? value.toFixed(0) : value.toFixed(digits);
}

function timed(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds >= 1) return `${seconds.toPrecision(2)} s`;
  return seconds >= 1e-3 ? `${(1e3 * seconds).toPrecision(2)} ms` : `${(1e6 * seconds).toFixed(0)} µs`;
}

// A number with a bar from 0 to 1 behind it.
function barred(value, text, share = value) {
  if (value === null || value === undefined) return element("span", { class: "quiet" }, "–");
  const width = Math.round(100 * clamp(share, 0, 1));
  return element("span", { class: "barred" }, [
    shape("svg", { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
      shape("rect", { width, height: 10 })),
    element("span", {}, text),
  ]);
}

function correlation(entry, kind, group = "all", coefficient = "spearman") {
  return entry.grounding[kind]?.groups[group]?.[coefficient] ?? null;
}

// The interval over training runs, or where there is none Fisher's.
function withInterval(found) {
  if (!found) return "–";
  const [low, high] = found.over_models ?? [found.low, found.high];
  return element("span", {}, [small(found.value), element("small", { class: "quiet interval" }, `${small(low)} to ${small(high)}`)]);
}

// The first, too, if others cannot be told from it.
function isLevel(k) {
  return DATA.level.length > 0 && (DATA.level.includes(entries[k].name) || entries[k].name === DATA.leader);
}

function measureName(k) {
  return element("button", { type: "button", class: "plain pick", click: () => choose(k), "aria-pressed": String(chosen === k) },
    named(entries[k].name));
}

function ranking() {
  const rows = DATA.rows;
  const numbers = (title, key, about, cell) => ({ title, about, number: true, key: (k) => rows[k][key], cell });
  const columns = [
    { title: "Measure", key: (k) => k, cell: measureName },
    numbers("ρ, mean", "spearman", "rank correlation with the share of equal answers; 1 is best", (k) => barred(rows[k].spearman, small(rows[k].spearman))),
    ...KINDS.map((kind) => ({
      title: `ρ ${kind}`, about: `networks that differ in ${kind}; 95 % interval`, number: true,
      key: (k) => correlation(entries[k], kind)?.value ?? null, cell: (k) => withInterval(correlation(entries[k], kind)),
    })),
    {
      title: "Rank", about: DATA.level.length ? "=: cannot be told from the first" : "by mean ρ", number: true, key: (k) => k,
      cell: (k) => (rows[k].rank === null ? "–" : isLevel(k) ? "1 =" : String(rows[k].rank)),
    },
    numbers("r, mean", "pearson", "the same, linear", (k) => small(rows[k].pearson) || "–"),
    numbers("AUC", "auc", "trained told from untrained; 0.5 is chance, 1 best", (k) => barred(rows[k].auc, small(rows[k].auc), 2 * ((rows[k].auc ?? 0.5) - 0.5))),
    numbers("Moved", "moved_in_vain", "by changes that keep the function; 0 best, 1 as far as untrained", (k) => small(rows[k].moved_in_vain) || "–"),
    numbers("Noticed", "noticed", "when the function is broken; 1 best", (k) => small(rows[k].noticed) || "–"),
    numbers("Time", "seconds", "for one pair", (k) => timed(rows[k].seconds) || "–"),
  ];
  return tableOf(columns, rows.map((_, k) => k), "Measures by mean ρ");
}

function tableOf(columns, rows, label) {
  return element("div", { class: "ranking" }, sortable(columns, rows, label));
}

function manipulations() {
  const names = Object.entries(entries.find((e) => e.manipulation)?.manipulation.manipulations ?? {});
  const rows = entries.map((_, k) => k).filter((k) => entries[k].manipulation);
  const at = (k, name) => entries[k].manipulation.manipulations[name];
  const cell = (k, name) => {
    const { moved, value, why, keeps } = at(k, name);
    if (moved === undefined || moved === null) return element("span", { class: "quiet", title: why }, "–");
    const badness = clamp(keeps ? Math.abs(moved) : 1 - moved, 0, 1);
    return element("span", { class: `shade shade-${Math.round(4 * badness)}`, title: `value ${written(value)}` }, small(moved));
  };
  const columns = [
    { title: "Measure", key: (k) => k, cell: measureName },
    ...names.map(([name]) => ({ title: name, number: true, key: (k) => at(k, name).moved ?? null, cell: (k) => cell(k, name) })),
  ];
  const facts = names.map(([name, { keeps, about: words, agreement }]) => [name,
    `${words}; ${agreement === null ? "not tried" : `${Math.round(100 * agreement)} % of images answered as before`}` +
      ` (${keeps ? "function kept: 0 is best" : "function broken: 1 is best"})`]);
  return [tableOf(columns, rows, "Manipulations"), factList(facts)];
}

// A column for each number or kind of probing images; found(calibration) has [number or kind, value] pairs.
function byImages(label, found, cell, headings = (keys) => keys) {
  const values = entries.map(({ calibration }) => new Map(calibration ? found(calibration) : []));
  const rows = entries.map((_, k) => k).filter((k) => values[k].size);
  const value = (k, key) => values[k].get(key) ?? null;
  const columns = headings([...new Set(rows.flatMap((k) => [...values[k].keys()]))]).map((key) => ({
    title: typeof key === "number" ? key.toLocaleString("en") : key.replaceAll("_", " "), number: true,
    key: (k) => value(k, key), cell: (k) => cell(value(k, key)),
  }));
  return columns.length ? tableOf([{ title: "Measure", key: (k) => k, cell: measureName }, ...columns], rows, label) : null;
}

function byNumber(found, cell) {
  return byImages("By number of probing images", found, cell, (numbers) => numbers.sort((a, b) => a - b));
}

const aucs = (pairs) => pairs.map(([key, { auc }]) => [key, auc]);
const byKind = () => byImages("By kind of probing images", ({ kinds }) => aucs(Object.entries(kinds ?? {})), overlap);

function overlap(value) {
  if (value === null) return "–";
  return element("span", { class: `shade shade-${Math.round(4 * clamp(2 * (1 - value), 0, 1))}` }, small(value));
}
