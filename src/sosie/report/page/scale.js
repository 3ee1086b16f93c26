// From a value to a colour. The ends come with the data; "alike" is always the bright end.

const palette = colours(DATA.ramp);

// The smallest and the largest of some numbers; if they are equal up to rounding, with a margin.
function endsOf(numbers) {
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (high - low > 1e-6 * size) return [low, high];
  return size ? [low - size / 2, high + size / 2] : [-0.5, 0.5];
}

// The ends of an axis: a little beyond the values, or the whole scale; at least what is drawn.
function axisEnds(values, full, whole) {
  const known = values.filter((value) => value !== null);
  if (whole || !known.length) return endsOf([...known, ...full]);
  const [low, high] = endsOf(known);
  const margin = 0.05 * (high - low);
  const [least, most] = [Math.min(...full, ...known), Math.max(...full, ...known)];
  return endsOf([Math.max(low - margin, least), Math.min(high + margin, most)]);
}

// Round numbers between two ends, about `count` of them.
function ticksBetween(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((k) => k >= rough * 0.999);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-6); k * step <= high + step * 1e-6; k += 1) ticks.push(k * step);
  const digits = clamp(Math.ceil(-Math.log10(step) + (step / power === 2.5 ? 1 : 0) - 1e-9), 0, 12);
  const powers = digits > 5 || Math.max(Math.abs(low), Math.abs(high)) >= 1e6;
  const text = (value) => (value === 0 ? "0" : Number(value.toPrecision(8)).toExponential());
  return ticks.map((value) => ({ value, text: powers ? text(value) : value.toFixed(digits) }));
}

function colourBar(grid, ends, size) {
  const id = `ramp-${Math.random().toString(36).slice(2)}`;
  const stops = DATA.ramp.map((hex, k) =>
    shape("stop", { offset: k / (DATA.ramp.length - 1), "stop-color": hex }));
  const [far, alike] = ends;
  const ticks = ticksBetween(Math.min(far, alike), Math.max(far, alike), size / 64).map(({ value, text }) => {
    const at = (value - far) / (alike - far);
    const atEnd = grid.clipped && value === grid.full[0] && ends === grid.full;
    const beyond = atEnd ? (grid.closer === "up" ? "≤ " : "≥ ") : "";
    return shape("text", { class: "label", x: at * size, y: 42, "text-anchor": anchorAt(at) }, beyond + text);
  });
  return shape("g", { class: "bar" }, [
    shape("defs", {}, shape("linearGradient", { id }, stops)),
    shape("text", { class: "label quiet", x: 0, y: 10 }, "unlike"),
    shape("text", { class: "label", x: size / 2, y: 10, "text-anchor": "middle" }, shortened(grid.measure, size - 110)),
    shape("text", { class: "label quiet", x: size, y: 10, "text-anchor": "end" }, "alike"),
    shape("rect", { x: 0, y: 17, width: size, height: 10, rx: 2, fill: `url(#${id})` }),
    ...ticks,
  ]);
}

// A text instead of lines if there is nothing to draw.
function nothingDrawn({ left, width }, numbers) {
  if (numbers.some((value) => value !== null)) return null;
  return shape("text", { class: "label quiet", x: (left + width) / 2, y: 120, "text-anchor": "middle" }, "Every value is undefined.");
}

function anchorAt(at) {
  if (at < 0.02) return "start";
  return at > 0.98 ? "end" : "middle";
}
