// The page of a diff: the error along the layers, every site, what they answer, what they are made of.

function namesOf(site) {
  return site.site_a === site.site_b ? [named(site.site_a)] : [named(site.site_a), " = ", named(site.site_b)];
}

function siteTable(rows, label) {
  const value = (title, key, about) => ({ title, about, number: true, key: (s) => s[key], cell: (s) => number(s[key]) });
  const place = (s) => rows.indexOf(s);
  return sortable([
    { title: "Site", key: place, cell: (s) => element("span", { class: s.inside ? "opened" : null }, namesOf(s)) },
    { ...value("Error", "error"), cell: (s) => element("span", { class: s.beyond ? "verdict" : null }, number(s.error)) },
    value("Made here", "made"),
    value("Floor", "floor"),
    value("SQNR, dB", "sqnr"),
    value("Largest", "largest"),
    { title: "At", key: place, cell: (s) => element("span", { class: "one-line" }, s.at) },
    value("Cosine", "cosine"),
    { ...value("Beyond tolerance", "mismatched"), cell: (s) => (s.mismatched === null ? "–" : `${number(100 * s.mismatched)} %`) },
    value("Slope", "slope"),
    value("Shift", "shift"),
    { title: "Paired", key: place, cell: (s) => named(s.paired, "words one-line") },
    { title: "Notes", key: (s) => s.notes.length, cell: (s) => named(s.notes.join("; "), "words notes") },
  ], rows, label);
}

// The sites that were opened, and what was found inside them.
function opened() {
  const open = new Set(DATA.sites.map(({ inside }) => inside).filter(Boolean));
  return DATA.sites.filter(({ site_a: name, inside }) => inside || open.has(name));
}

const SITE_COLUMNS = ["site_a", "site_b", "paired", "inside", "error", "low", "high", "made", "floor", "made_floor", "beyond", "sqnr",
  "largest", "at", "cosine", "least_cosine", "mismatched", "shift", "slope", "inputs"];

function csvOf(columns, rows) {
  return [columns, ...rows.map((row) => columns.map((name) => (typeof row[name] === "boolean" ? String(row[name]) : row[name])))];
}

function errors() {
  const drawn = errorFigure();
  const notes = [element("p", { class: "quiet legends" }, [
    ...SERIES.map(({ title, className }) => legend(className, title)),
    element("span", { class: "legend" }, [element("span", { class: "swatch floor-own" }, ""), "floor"]),
    DATA.factor === null ? null : element("span", { class: "legend" }, [element("span", { class: "swatch floor-most" }, ""), `up to ${number(DATA.factor)} × the floor`]),
  ])];
  if (DATA.floor) notes.push(element("p", { class: "quiet" }, DATA.floor));
  return figure("Error along the layers", notes, drawn,
    tools(downloads([...DATA.names, "error"], () => csvOf(SITE_COLUMNS, DATA.sites), () => drawn.querySelector("svg"))));
}

function outputs() {
  const rows = DATA.outputs;
  return section("What they answer", sortable([
    {
      title: "Measure", key: (o) => rows.indexOf(o),
      cell: (o) => element("span", {}, [named(o.measure), o.meaning ? element("p", { class: "meaning quiet" }, named(o.meaning, "words")) : null]),
    },
    { title: "Value", number: true, key: (o) => o.value, cell: (o) => number(o.value) },
    { title: "95 % interval", number: true, key: (o) => o.low, cell: (o) => (o.low === null ? "" : `${number(o.low)} to ${number(o.high)}`) },
    { title: "Where", key: (o) => rows.indexOf(o), cell: (o) => o.at },
  ], rows, "What they answer"), tools(downloads([...DATA.names, "answers"], () => csvOf(["measure", "value", "low", "high", "at"], rows))));
}

function weights() {
  const rows = DATA.weights;
  const left = DATA.tensors - rows.length;
  return section("What they are made of", sortable([
    { title: "Tensor", key: (t) => rows.indexOf(t), cell: (t) => named(t.name) },
    { title: "Shape", key: (t) => rows.indexOf(t), cell: (t) => t.shape },
    { title: "Change", number: true, key: (t) => (t.equal ? 0 : t.change), cell: (t) => (t.equal ? "equal" : number(t.change)) },
    { title: "Largest", number: true, key: (t) => t.largest, cell: (t) => number(t.largest) },
    { title: "Effective rank", number: true, key: (t) => t.rank, cell: (t) => number(t.rank) },
    { title: "Types", key: (t) => rows.indexOf(t), cell: (t) => [...new Set([t.dtype_a, t.dtype_b].filter(Boolean))].join(" → ") },
    { title: "Notes", key: (t) => t.notes.length, cell: (t) => named([...(t.low_rank === null ? [] : [`rank ${t.low_rank}`]), ...t.notes].join("; "), "words notes") },
  ], rows, "What they are made of"),
  left > 0 ? element("p", { class: "quiet table-note" }, `and ${left.toLocaleString("en")} more, which changed less: the saved result has them all`) : null,
  tools(downloads([...DATA.names, "weights"], () => csvOf(["name", "shape", "dtype_a", "dtype_b", "equal", "change", "largest", "rank", "low_rank"], rows))));
}

content.append(element("div", { class: "panel" }, [
  asked.length ? errors() : null,
  opened().length ? section("Inside the layers that make it", siteTable(opened(), "Inside the layers that make it")) : null,
  DATA.sites.length ? section("Site by site", siteTable(DATA.sites, "Site by site")) : null,
  DATA.outputs.length ? outputs() : null,
  DATA.weights.length ? weights() : null,
  DATA.caveats.length ? section("Caveats", element("ol", { class: "caveats" }, DATA.caveats.map((text) => element("li", {}, named(text, "words"))))) : null,
  DATA.provenance.length ? record("Provenance", DATA.provenance, false) : null,
].filter(Boolean)));
content.querySelectorAll(".curve-host").forEach((host) => host.redraw());
