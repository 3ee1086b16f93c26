// One small map per layer: every time against every other, the first at the top left.

// Bytes of red, green and blue for every level, for pictures that are filled pixel by pixel.
const bytes = palette.map((colour) => colour.match(/\d+/g).map(Number));

function timeMap(found, s) {
  const [rows, columns] = [DATA.stepsA.length, DATA.stepsB.length];
  const canvas = element("canvas", { width: columns, height: rows, "aria-hidden": "true" });
  const cursor = shape("path", { class: "cursor" });
  const place = shape("circle", { class: "cursor-place", r: 4 });
  const overlay = shape("svg", { viewBox: `0 0 ${columns} ${rows}`, preserveAspectRatio: "none", "aria-hidden": "true" }, [
    ...found.measure.settled.flatMap((steps, k) => settledLines(steps[s], rows, k)), cursor,
  ]);
  const spot = shape("svg", { class: "spot", "aria-hidden": "true" }, place);
  const frame = element("div", { class: "time-frame" }, [canvas, overlay, spot]);
  const host = element("figure", { class: "time-map", role: "img", "aria-label": told(found, s) }, [
    element("figcaption", { title: DATA.sites[s] }, named(DATA.sites[s])),
    frame,
    element("p", { class: "time-ends quiet", "aria-hidden": "true" },
      [element("span", {}, String(DATA.stepsB[0])), element("span", {}, String(DATA.stepsB.at(-1)))]),
  ]);
  frame.style.aspectRatio = `${columns} / ${rows}`;
  host.paint = () => paint(canvas, found, s);
  host.follow = () => {
    cursor.setAttribute("d", `M0 ${state.a + 0.5}H${columns}M${state.b + 0.5} 0V${rows}`);
    filled(place, { cx: `${(100 * (state.b + 0.5)) / columns}%`, cy: `${(100 * (state.a + 0.5)) / rows}%` });
  };
  const under = (event) => {
    const area = frame.getBoundingClientRect();
    const at = (share, count) => clamp(Math.floor(share * count), 0, count - 1);
    return [at((event.clientY - area.top) / area.height, rows), at((event.clientX - area.left) / area.width, columns)];
  };
  tipped(frame, (event) => {
    const [a, b] = under(event);
    return siteTip(s, found.at(s, a, b), between(a, b));
  });
  frame.addEventListener("click", (event) => {
    const [a, b] = under(event);
    move({ a, b });
  });
  host.paint();
  host.follow();
  return host;
}

function paint(canvas, found, s) {
  const context = canvas.getContext("2d");
  const picture = context.createImageData(canvas.width, canvas.height);
  for (let k = 0; k < canvas.width * canvas.height; k += 1) {
    const value = found.at(s, Math.floor(k / canvas.width), k % canvas.width);
    if (value === null) continue; // left clear: the frame's hatching shows
    picture.data.set([...bytes[levelOf(value, found.ends)], 255], 4 * k);
  }
  context.putImageData(picture, 0, 0);
}

// The step from which on a layer has settled: the edges of the square of times that are all near the last.
function settledLines(step, rows, k) {
  if (step === null || step === undefined || step === 0) return [];
  const d = `M${step} ${rows}V${step}H${rows}`;
  return [shape("path", { class: `settled-under level-${k}`, d }), shape("path", { class: `settled level-${k}`, d })];
}

function told(found, s) {
  const settled = DATA.thresholds.map((threshold, k) => {
    const step = found.measure.settled[k][s];
    return `settled at ${threshold}: ${step === null ? "not before the last step" : `step ${DATA.stepsA[step]}`}`;
  });
  return [`${DATA.sites[s]}: every step against every other`, ...settled].join(", ");
}

// All maps as one drawing, to be saved.
function mapsDrawing(found) {
  const [size, gap, head, perRow] = [150, 22, 64, Math.min(DATA.sites.length, 5)];
  const high = Math.min((size * DATA.stepsA.length) / DATA.stepsB.length, 3 * size);
  const grid = { clipped: found.measure.clipped, full: found.measure.full, closer: found.measure.closer, measure: found.measure.name };
  const maps = [...content.querySelectorAll(".time-map canvas")].flatMap((canvas, s) => {
    const [x, y] = [(s % perRow) * (size + gap), head + Math.floor(s / perRow) * (high + 40)];
    return [
      shape("text", { class: "label", x, y: y + 12 }, [shortened(DATA.sites[s], size)]),
      shape("image", { x, y: y + 18, width: size, height: high, href: canvas.toDataURL(), preserveAspectRatio: "none", style: "image-rendering: pixelated" }),
    ];
  });
  return drawing(Math.max(perRow * (size + gap), 320), head + Math.ceil(DATA.sites.length / perRow) * (high + 40),
    `${found.measure.name}: every step against every other`, [colourBar(grid, found.ends, 300), ...maps]);
}
