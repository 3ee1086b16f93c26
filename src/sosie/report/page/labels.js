// Labels that can be read at any size: cut in the middle to fit, and reduced to every k-th.

const LABEL = 11; // px
const LEAN = Math.SQRT1_2; // sine and cosine of the 45 degrees at which column labels stand

const ruler = document.createElement("canvas").getContext("2d");

function widthOf(text, size = LABEL) {
  ruler.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
  return ruler.measureText(text).width;
}

// Keep a tail that starts at a number or a part of the name, "encode…11.self_attention"; where that is too long,
// keep only the number, "e…11…attention", which distinguishes the layers.
function cut(letters, most) {
  if (letters.length <= most) return letters.join("");
  const begins = (k) =>
    /[._/]/.test(letters[k - 1]) || (/\d/.test(letters[k]) && !/\d/.test(letters[k - 1]));
  const starts = letters.map((_, k) => k).filter((k) => k && begins(k));
  const start = starts.find((k) => letters.length - k >= 0.45 * most && letters.length - k <= 0.75 * most);
  const tail = start === undefined ? Math.floor(0.6 * most) : letters.length - start;
  const number = letters.join("").match(/\d+(?=\D*$)/u);
  const lost = number && !/\d/.test(letters.slice(letters.length - tail).join(""));
  if (!lost || most < number[0].length + 6) return joined(letters, most, tail, "…");
  const middle = `…${number[0]}…`;
  return joined(letters, most, Math.ceil(0.7 * (most - middle.length)), middle);
}

function joined(letters, most, tail, middle) {
  const head = letters.slice(0, most - middle.length - tail).join("");
  return head + middle + letters.slice(letters.length - tail).join("");
}

function shortened(name, room, size = LABEL) {
  if (name.length < 400 && widthOf(name, size) <= room) return name;
  const letters = Array.from(name);
  for (let most = Math.min(letters.length, Math.ceil(room / 3)); most > 4; most -= 1) {
    const text = cut(letters, most);
    if (widthOf(text, size) <= room) return text;
  }
  return `${letters[0]}…`;
}

function every(pitch, least) {
  return Math.max(1, Math.ceil(least / pitch - 1e-9));
}

function shortenedAll(names, room) {
  const texts = names.map((name) => shortened(name, room));
  return { texts, width: Math.max(0, ...texts.map((text) => widthOf(text))) };
}

// Labels under an axis: upright if the longest fits its column, else leaning, at least a line apart.
function footLabels(axis, { left, top, pitch, leaning }) {
  const step = every(pitch, leaning ? (LABEL + 4) / LEAN : 1);
  const group = shape("g", { class: "labels" });
  axis.texts.forEach((text, k) => {
    if (k % step) return;
    const x = left + (k + 0.5) * pitch;
    const place = leaning
      ? { x: x + 4, y: top + 10, "text-anchor": "end", transform: `rotate(-45 ${x + 4} ${top + 10})` }
      : { x, y: top + LABEL + 5, "text-anchor": "middle" };
    group.append(
      shape("line", { class: "tick", "data-column": k, x1: x, x2: x, y1: top, y2: top + 4 }),
      shape("text", { ...place, class: "label", "data-column": k }, [shape("title", {}, axis.names[k]), text]),
    );
  });
  return group;
}

// The space that labels under an axis need below it, and to the left of its first column.
function footRoom(axis, pitch) {
  const leaning = axis.width > pitch - 8;
  if (!leaning) return { leaning, height: LABEL + 12, overhang: 0 };
  return { leaning, height: axis.width * LEAN + 20, overhang: axis.width * LEAN + LABEL - pitch / 2 };
}

function axisOf(names, room) {
  return { names, ...shortenedAll(names, room) };
}
