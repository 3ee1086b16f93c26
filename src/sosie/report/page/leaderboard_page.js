// The page: ranking, one measure in detail, and the three stages.

const content = document.getElementById("content");
let chosen = 0;
let group = "all";
let coefficient = "spearman";
const detail = element("div", {});
const figure = element("div", {});

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
  return element("section", { class: "card" }, [
    element("h3", {}, named(entry.name)),
    element("dl", { class: "facts" }, facts.flatMap(([term, text]) => [element("dt", {}, term), element("dd", {}, named(text, "words"))])),
  ]);
}

function switched(label, options, current, change) {
  return element("div", { class: "switch", role: "radiogroup", "aria-label": label }, options.map(([value, title]) => {
    const input = element("input", { type: "radio", name: label, change: () => change(value) });
    input.checked = value === current;
    return element("label", { class: "choice" }, [input, title]);
  }));
}

function redrawFigure() {
  figure.replaceChildren(correlationFigure(group, coefficient));
}

function lines(title, found) {
  const rows = found.map(([key, text]) => element("tr", {}, [element("th", { scope: "row" }, named(key)), element("td", {}, named(text, "words"))]));
  return element("details", { class: "card" }, [
    element("summary", {}, element("h3", {}, title)),
    element("div", { class: "scroll" }, element("table", { class: "provenance" }, element("tbody", {}, rows))),
  ]);
}

const left = Object.entries(DATA.leftOut);
redrawFigure();
detail.append(detailOf(entries[0]));
content.append(element("div", { class: "panel" }, [
  section("Leaderboard", DATA.reading, ranking()),
  detail,
  section("Does it say what networks do?",
    "Correlation of the measure, turned so that up is alike, with the share of images two networks agree on. " +
    "Thin: Fisher’s interval, which takes pairs for independent. Thick: bootstrap over training runs, which pairs share.",
    element("div", { class: "switches" }, [
      switched("Images", GROUPS.map((name) => [name, name]), group, (value) => { group = value; redrawFigure(); }),
      switched("Coefficient", [["spearman", "Spearman’s ρ"], ["pearson", "Pearson’s r"]], coefficient,
        (value) => { coefficient = value; redrawFigure(); }),
    ]), figure),
  section("Calibration: unlike and alike",
    "Networks that were never trained should be unlike, consecutive checkpoints of a converged network alike.", ...distributionFigure()),
  section("Calibration by number of probing images",
    "AUC: how often a pair of consecutive checkpoints is closer than a pair of untrained networks. 0.5 is chance.", byNumber("auc", overlap)),
  byKind() ? section("Calibration by kind of probing images", "The same, probed by corrupted images.", byKind()) : null,
  section("Manipulation", "How far the value moves: 0 as of the network with itself, 1 as of two that were never trained. Dark is bad.",
    ...manipulations()),
  section("Time by number of probing images", "For one pair alone, nothing known beforehand; the median of a few.", byNumber("seconds", timed)),
  left.length ? section("Not tested", null, element("p", {}, `${left.map(([name]) => name).join(", ")}: ${left[0][1]}.`)) : null,
  lines("Scale", DATA.scale),
  lines("Provenance", DATA.provenance),
]));
content.querySelectorAll(".curve-host").forEach((host) => host.redraw());
