// Curves: the value of each time with the last, a line per layer; and all layers at one time.

const HEIGHT = 220; // px

// Colours from the first layer to the last, visible on the background.
function depthColour(s) {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const [from, to] = dark ? [0.35, 1] : [0, 0.78];
  const share = DATA.sites.length > 1 ? s / (DATA.sites.length - 1) : 0;
  return palette[Math.round((from + share * (to - from)) * (LEVELS - 1))];
}

function plot(width, ends, { left, foot, count }) {
  const [far, near] = ends;
  const ticks = ticksBetween(Math.min(far, near), Math.max(far, near), 5);
  const start = Math.max(left, Math.ceil(Math.max(...ticks.map(({ text }) => widthOf(text)))) + 12);
  const span = width - start - 10;
  return {
    width, ticks, left: start, top: 26, foot, span, height: 26 + HEIGHT + foot,
    at: (k) => start + (count > 1 ? (span * k) / (count - 1) : span / 2),
    y: (value) => 26 + HEIGHT * (1 - clamp((value - far) / (near - far), -0.02, 1.02)),
  };
}

const upwards = () => shape("text", { class: "label axis", x: 0, y: 12 }, "↑ more alike");

function siteTip(s, value, words) {
  return [tipValue(written(value)), element("p", {}, named(DATA.sites[s])), element("p", { class: "quiet" }, words)];
}

// Recorded times are at equal distances, whatever their steps; as many are labelled as fit.
function timeLabels(plan, steps) {
  const room = Math.max(...steps.map((step) => widthOf(String(step)))) + 14;
  const step = every(plan.span / Math.max(steps.length - 1, 1), room);
  const last = steps.length - 1;
  return shape("g", { class: "labels" }, steps.flatMap((text, k) => {
    if (k !== last && (k % step || last - k < step)) return [];
    const anchor = k === last && last ? "end" : k ? "middle" : "start";
    return [
      shape("line", { class: "tick", x1: plan.at(k), x2: plan.at(k), y1: 26 + HEIGHT, y2: 30 + HEIGHT }),
      shape("text", { class: "label", x: plan.at(k), y: 26 + HEIGHT + LABEL + 7, "text-anchor": anchor }, String(text)),
    ];
  }));
}

function overTime(found) {
  const host = redrawn(element("div", { class: "curve-host" }), (width) => {
    const plan = plot(width, found.curveEnds, { left: 30, foot: 42, count: DATA.stepsA.length });
    const lines = DATA.sites.map((_, s) => shape("g", { class: "site-line", "data-site": s }, [
      ...broken(DATA.stepsA.map((__, k) => {
        const value = found.toEnd(s, k);
        return value === null ? null : [plan.at(k), plan.y(value)];
      }), { colour: depthColour(s) }),
      ...found.settledDots(s).map((k) =>
        shape("circle", { class: "settled-dot", cx: plan.at(k), cy: plan.y(found.toEnd(s, k)), r: 3, fill: depthColour(s) })),
    ]));
    const cursor = shape("line", { class: "cursor", y1: plan.top - 4, y2: plan.top + HEIGHT });
    host.follow = () => filled(cursor, { x1: plan.at(state.a), x2: plan.at(state.a) });
    const label = `${found.measure.name} with the last state over time, a line for each layer; the table has the numbers`;
    const svg = drawing(width, plan.height, label, [
      gridLines(plan), upwards(), ...lines, nothingDrawn(plan, found.measure.value), cursor, timeLabels(plan, DATA.stepsA),
      shape("text", { class: "label axis", x: plan.left, y: plan.height - 4 }, `step${DATA.twoRuns ? " of A" : ""} →`),
    ], { class: "curve" });
    host.replaceChildren(svg);
    host.follow();
    pointAtLines(svg, found, plan);
  });
  return host;
}

// The line nearest to the pointer is highlighted and named.
function pointAtLines(svg, found, plan) {
  const nearest = (event) => {
    const area = svg.getBoundingClientRect();
    const last = DATA.stepsA.length - 1;
    const k = clamp(Math.round(((event.clientX - area.left - plan.left) / plan.span) * last), 0, last);
    const distance = (s) => {
      const value = found.toEnd(s, k);
      return value === null ? Infinity : Math.abs(plan.y(value) - (event.clientY - area.top));
    };
    const s = DATA.sites.map((_, i) => i).reduce((one, other) => (distance(other) < distance(one) ? other : one), 0);
    return [s, k];
  };
  tipped(svg, (event) => {
    const [s, k] = nearest(event);
    svg.classList.add("pointed");
    svg.querySelectorAll(".site-line").forEach((line) => line.classList.toggle("near", Number(line.dataset.site) === s));
    return siteTip(s, found.toEnd(s, k), `step ${DATA.stepsA[k]} and the last, ${DATA.stepsB.at(-1)}`);
  });
  svg.addEventListener("pointerleave", () => svg.classList.remove("pointed"));
  svg.addEventListener("click", (event) => move({ a: nearest(event)[1] }));
}

function overLayers(found) {
  const host = redrawn(element("div", { class: "curve-host" }), (width) => {
    const foot = axisOf(DATA.sites, clamp(width * 0.25, 64, 130));
    const count = DATA.sites.length;
    const under = footRoom(foot, (width - 60) / count);
    const plan = plot(width, found.ends, { left: Math.ceil(Math.min(under.overhang, width * 0.3)), foot: under.height + 6, count });
    const pitch = plan.span / count;
    const x = (s) => plan.left + (s + 0.5) * pitch;
    const lines = shape("g", {});
    host.follow = () => {
      const points = (column) => DATA.sites.map((_, s) => {
        const value = found.at(s, state.a, column);
        return value === null ? null : [x(s), plan.y(value)];
      });
      lines.replaceChildren(
        ...(state.b === DATA.stepsB.length - 1 ? []
          : [shape("g", { class: "line-best" }, broken(points(DATA.stepsB.length - 1)))]),
        shape("g", { class: "line-depth profile" }, broken(points(state.b), { dots: true })),
      );
    };
    const svg = drawing(width, plan.height, `${found.measure.name} of two times, layer by layer`, [
      gridLines(plan), upwards(), lines, nothingDrawn(plan, found.measure.value),
      footLabels(foot, { left: plan.left, top: 26 + HEIGHT, pitch, leaning: under.leaning }),
    ], { class: "curve" });
    host.replaceChildren(svg);
    host.follow();
    tipped(svg, (event) => {
      const s = clamp(Math.floor((event.clientX - svg.getBoundingClientRect().left - plan.left) / pitch), 0, count - 1);
      return siteTip(s, found.at(s, state.a, state.b), between());
    });
  });
  return host;
}
