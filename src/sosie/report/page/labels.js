// Labels that can be read at any size: cut in the middle to fit, and reduced to every k-th.

const LEAN = Math.SQRT1_2; // sine and cosine of the 45 degrees at which column labels stand

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
