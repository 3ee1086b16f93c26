// The page: ranking, one measure in detail, and the three stages.

let chosen = 0;
let group = "all";
let coefficient = "spearman";
const detail = element("div", {});
const correlations = element("div", {});

function choose(k) {
  chosen = k;
  detail.replaceChildren(detailOf(entries[k]));
  document.querySelectorAll(".pick").forEach((b) => b.setAttribute("aria-pressed", String(b.textContent === entries[k].name)));
  announce(`${entries[k].name} is shown in detail`);
  detail.scrollIntoView({ block: "nearest", behavior: "smooth" });
}

function detailOf(entry) {
  const against = Object.entries(entry.against).map(([kind, found]) => {
    if (found.why) return [kind, found.why];
    const over = found.over_models;
    return [kind, `${small(found.value)}${over ? ` (${range(over[0], over[1], 2)} over training runs)` : ""}, p = ${found.p.toPrecision(2)} (Meng)`];
  });
  const same = entry.manipulation?.same;
  const facts = [
    ["Compares", entry.of === "models" ? "networks" : "activations at the last hidden layer"],
    ["Closer", entry.closer === null ? "not known" : entry.closer === "up" ? "larger is more alike" : "smaller is more alike"],
    ...(entry.calibration?.number ? [["Images", entry.calibration.number.toLocaleString("en")]] : []),
    ...(same === undefined ? [] : [["With itself", written(same)]]),
    ...entry.notes.map((note) => ["Note", note]),
    ...entry.undefined.map((why) => ["No rank", why]),
    ...Object.entries(entry.failures).map(([stage, why]) => [`Failed: ${stage}`, why]),
    ...against.map(([kind, text]) => [`ρ ${kind}, less that of ${DATA.leader}`, text]),
  ];
  return section(named(entry.name), factList(facts));
}

function drawCorrelations(changes = {}) {
  group = changes.group ?? group;
  coefficient = changes.coefficient ?? coefficient;
  const drawn = correlationFigure(group, coefficient);
  const table = () => [["measure", ...KINDS.flatMap((kind) => [kind, `${kind} low`, `${kind} high`])], ...entries.map((entry) =>
    [entry.name, ...KINDS.flatMap((kind) => {
      const found = correlation(entry, kind, group, coefficient);
      const [low, high] = found?.over_models ?? [found?.low ?? null, found?.high ?? null];
      return [found?.value ?? null, low, high];
    })])];
  correlations.replaceChildren(drawn, tools(downloads(["benchmark", coefficient, group], table, () => drawn.querySelector("svg"))));
}

function boardTable() {
  const heads = ["rank", "measure", "spearman", "pearson", "auc", "moved_in_vain", "noticed", "seconds"];
  return [heads, ...DATA.rows.map((row) => heads.map((head) => row[head]))];
}

const left = Object.entries(DATA.leftOut);
drawCorrelations();
detail.append(detailOf(entries[0]));
content.append(element("div", { class: "panel" }, [
  section("Leaderboard", about(DATA.order), ranking(), tools(downloads(["benchmark"], boardTable))),
  detail,
  section("Does it say what networks do?",
    about("Correlation of the measure, turned so that up is alike, with the share of images two networks agree on. " +
      "Thin: Fisher’s interval, which takes pairs for independent. Thick: bootstrap over training runs, which pairs share."),
    element("div", { class: "switches" }, [
      choices("images", "Images", GROUPS.map((name) => [name, name]), group, (value) => drawCorrelations({ group: value })),
      choices("coefficient", "Coefficient", [["spearman", "Spearman’s ρ"], ["pearson", "Pearson’s r"]], coefficient,
        (value) => drawCorrelations({ coefficient: value })),
    ]), correlations),
  section("Calibration: unlike and alike",
    about("Networks that were never trained should be unlike, consecutive checkpoints of a converged network alike."),
    ...distributionFigure()),
  section("Calibration by number of probing images",
    about("AUC: how often a pair of consecutive checkpoints is closer than a pair of untrained networks. 0.5 is chance."),
    byNumber(({ numbers }) => aucs(numbers), overlap)),
  byKind() ? section("Calibration by kind of probing images", about("The same, probed by corrupted images."), byKind()) : null,
  section("Manipulation",
    about("How far the value moves: 0 is the value of the network with itself, 1 that of two networks that were never trained. Dark is bad."),
    ...manipulations()),
  section("Time by number of probing images", about("For one pair alone, nothing computed beforehand; the median of a few."),
    byNumber(({ seconds }) => seconds, timed)),
  left.length ? section("Not tested", element("p", {}, `${left.map(([name]) => name).join(", ")}: ${left[0][1]}.`)) : null,
  record("Scale", DATA.scale, false),
  record("Provenance", DATA.provenance, false),
]));
content.querySelectorAll(".curve-host").forEach((host) => host.redraw());
