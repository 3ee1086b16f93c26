// Drawings: correlations with their intervals, and the two distributions of calibration.

const LINE = 17; // pixels per measure
const NAMES = 205; // pixels for names
const PANEL = 130; // pixels that a panel takes at least; what does not fit goes below

// One panel for each kind of pair; a dot, Fisher's interval (thin) and that over training runs (thick).
function correlationFigure(group, coefficient) {
  const shown = entries.map((_, k) => k).filter((k) => KINDS.some((kind) => correlation(entries[k], kind, group, coefficient)));
  const host = redrawn(element("div", { class: "curve-host" }), (width) => {
    const left = Math.min(NAMES, width * 0.3);
    const across = clamp(Math.floor((width - left) / PANEL), 1, KINDS.length);
    const each = (width - left) / across;
    const height = 34 + LINE * shown.length + 18;
    const lowest = Math.min(-0.2, ...shown.flatMap((k) => KINDS.map((kind) => correlation(entries[k], kind, group, coefficient)?.value ?? 0)));
    const low = Math.max(-1, Math.floor(lowest * 5) / 5);
    const panels = KINDS.map((kind, p) => shape("g", { transform: `translate(${(p % across) * each} ${Math.floor(p / across) * height})` }, [
      ...(p % across ? [] : shown.map((k, i) => nameAt(k, left, 34 + LINE * (i + 0.5)))),
      ...kindPanel({ kind, from: left + 8, size: each - 20, low, shown, group, coefficient, height }),
    ]));
    const label = `${coefficient} of each measure with agreement, by kind of pair; the table above has the numbers`;
    host.replaceChildren(drawing(width, height * Math.ceil(KINDS.length / across), label, panels));
  });
  return host;
}

function nameAt(k, left, y) {
  return shape("text", { class: "label", x: 0, y: y + 4 }, [shape("title", {}, entries[k].name), shortened(entries[k].name, left - 8)]);
}

function kindPanel({ kind, from, size, low, shown, group, coefficient, height }) {
  const x = (value) => from + (size * (clamp(value, low, 1) - low)) / (1 - low);
  const parts = [shape("text", { class: "label axis", x: from, y: 12 }, `differ in ${kind}`)];
  for (const tick of [low, 0, 0.5, 1].filter((t, i, all) => t >= low && all.indexOf(t) === i)) {
    parts.push(shape("line", { class: tick === 0 ? "zero" : "tick", x1: x(tick), x2: x(tick), y1: 24, y2: height - 18 }),
      shape("text", { class: "label axis", x: x(tick), y: height - 4, "text-anchor": "middle" }, String(tick)));
  }
  shown.forEach((k, i) => {
    const found = correlation(entries[k], kind, group, coefficient);
    if (!found) return;
    const y = 34 + LINE * (i + 0.5);
    const over = found.over_models;
    const facts = [
      ["Fisher, pairs as if independent", range(found.low, found.high, 2)],
      ["over training runs", over ? range(over[0], over[1], 2) : "undefined"], ["pairs", String(found.n)],
    ];
    const mark = shape("g", { class: "mark" }, [
      over ? shape("line", { class: "reach", x1: x(over[0]), x2: x(over[1]), y1: y, y2: y }) : null,
      shape("line", { class: "fisher", x1: x(found.low), x2: x(found.high), y1: y, y2: y }),
      shape("circle", { cx: x(found.value), cy: y, r: 3.2 }),
      shape("rect", { class: "catch", x: from, y: y - LINE / 2, width: size, height: LINE }),
    ]);
    parts.push(tipped(mark, () => [tipValue(small(found.value)), element("p", {}, named(entries[k].name)), tipFacts(facts)]));
  });
  return parts;
}

// The middle 95 % and the median of untrained networks and of consecutive checkpoints, for measures from 0 to 1.
function distributionFigure() {
  const inside = ({ quantiles }) => quantiles[0] >= -0.3 && quantiles[4] <= 1.0001;
  const shown = entries.map((_, k) => k).filter((k) => {
    const found = entries[k].calibration?.clean;
    return found?.alike && found.unlike && entries[k].closer === "up" && inside(found.alike) && inside(found.unlike);
  });
  const rest = entries.filter((e, k) => e.calibration?.clean.alike && !shown.includes(k)).map(({ name }) => name);
  const host = redrawn(element("div", { class: "curve-host" }), (width) => {
    const left = Math.min(NAMES, width * 0.3);
    const [from, size, height] = [left + 8, width - left - 24, 10 + LINE * shown.length + 22];
    const lowest = Math.min(0, ...shown.map((k) => entries[k].calibration.clean.unlike.quantiles[0]));
    const low = Math.floor(lowest * 10) / 10;
    const x = (value) => from + (size * (value - low)) / (1 - low);
    const ticks = [0, 0.25, 0.5, 0.75, 1].flatMap((tick) => [
      shape("line", { class: "tick", x1: x(tick), x2: x(tick), y1: 4, y2: height - 20 }),
      shape("text", { class: "label axis", x: x(tick), y: height - 5, "text-anchor": "middle" }, String(tick)),
    ]);
    const lines = shown.flatMap((k, i) => {
      const y = 10 + LINE * (i + 0.5);
      return [nameAt(k, left, y), ...["unlike", "alike"].map((side) => {
        const { quantiles: q, n } = entries[k].calibration.clean[side];
        return shape("g", { class: `box ${side}` }, [
          shape("title", {}, `${entries[k].name}, ${side === "alike" ? "consecutive checkpoints" : "untrained networks"}: ` +
            `median ${small(q[2], 3)}, middle 95 % ${small(q[0], 3)} to ${small(q[4], 3)}, ${n} pairs`),
          shape("line", { class: "whisker", x1: x(q[0]), x2: x(q[4]), y1: y, y2: y }),
          shape("line", { class: "middle", x1: x(q[1]), x2: Math.max(x(q[3]), x(q[1]) + 0.5), y1: y, y2: y }),
          shape("circle", { cx: x(q[2]), cy: y, r: 3.2 }),
        ]);
      })];
    });
    host.replaceChildren(drawing(width, height, "Values of untrained networks and of consecutive checkpoints, by measure", [...ticks, ...lines]));
  });
  const legends = element("p", { class: "quiet legends dots" }, [
    legend("unlike-key", "untrained networks"),
    legend("alike-key", "consecutive checkpoints"),
    "dot: median; thick: middle half; thin: middle 95 %",
  ]);
  const note = rest.length ? element("p", { class: "quiet table-note" }, `Not from 0 to 1, so not drawn: ${rest.join(", ")}.`) : null;
  const table = () => [["measure", "networks", "2.5 %", "25 %", "median", "75 %", "97.5 %"], ...shown.flatMap((k) => ["unlike", "alike"].map((side) =>
    [entries[k].name, side === "alike" ? "consecutive checkpoints" : "untrained networks", ...entries[k].calibration.clean[side].quantiles]))];
  return [legends, host, note, tools(downloads(["benchmark", "calibration"], table, () => host.querySelector("svg")))];
}
