// A heat map: A's layers are rows, from the first at the top; B's are columns, from the first at the left.

const HEAD = 78; // px above the cells: colour bar and the name of the rows
const BAR = 300; // px: the largest width of the colour bar
const LEGEND = 240; // px beside it for the legend of chance

function heatmap(grid) {
  const host = redrawn(element("div", { class: "map" }), (width) => {
    const plan = arrange(grid, width);
    const svg = drawing(plan.width, plan.height, grid.label, [
      hatching(plan), colourBar(grid, grid.ends, Math.min(plan.width - 2, BAR)), cells(grid, plan), faded(grid, plan),
      marks(grid, plan), printed(grid, plan), axes(grid, plan),
    ], { class: "heatmap", role: "application", tabindex: 0 });
    host.replaceChildren(svg);
    pointing(svg, grid, plan);
  });
  return host;
}

// Cells as large as the width allows, not taller than the screen, and always visible.
function arrange(grid, width) {
  const [rows, columns] = [grid.rows.length, grid.columns.length];
  const room = clamp(width * 0.25, 64, 180);
  const side = axisOf(grid.rows, room);
  const foot = axisOf(grid.columns, room);
  const largest = clamp(480 / Math.max(rows, columns), 48, 110);
  let left = Math.ceil(side.width) + 14;
  const fit = () => {
    const cellWidth = Math.min((width - left - 1) / columns, largest);
    const lowest = Math.max(84 / rows, rows <= 20 ? LABEL + 4 : 0); // few rows: a label for each
    const cellHeight = Math.min(clamp(cellWidth, lowest, Math.max(680 / rows, lowest)), largest);
    return { cellWidth: Math.min(cellWidth, Math.max(2 * cellHeight, 84 / columns)), cellHeight };
  };
  left = Math.ceil(Math.min(Math.max(left, footRoom(foot, fit().cellWidth).overhang), width * 0.4));
  const { cellWidth, cellHeight } = fit();
  const under = footRoom(foot, cellWidth);
  const [mapWidth, mapHeight] = [cellWidth * columns, cellHeight * rows];
  const legendBelow = grid.byChance && width < BAR + LEGEND;
  const top = HEAD + (legendBelow ? 20 : 0);
  const height = Math.ceil(top + mapHeight + under.height + 26);
  return { width, height, left, top, legendBelow, cellWidth, cellHeight, mapWidth, mapHeight, side, foot, under };
}

function box(plan, i, j) {
  const gap = Math.min(plan.cellWidth, plan.cellHeight) >= 11 ? 1 : 0;
  const snap = (value) => Math.round(value * 2) / 2;
  const x = snap(plan.left + j * plan.cellWidth);
  const y = snap(plan.top + i * plan.cellHeight);
  return {
    x, y,
    width: snap(plan.left + (j + 1) * plan.cellWidth) - x - gap,
    height: snap(plan.top + (i + 1) * plan.cellHeight) - y - gap,
  };
}

// One path per colour instead of one element per cell: 256 elements draw 25 000 cells.
function cells(grid, plan) {
  const paths = new Map();
  grid.value.forEach((value, k) => {
    const level = value === null ? "undefined" : levelOf(value, grid.ends);
    const { x, y, width, height } = box(plan, Math.floor(k / grid.columns.length), k % grid.columns.length);
    if (!paths.has(level)) paths.set(level, []);
    paths.get(level).push(`M${x} ${y}h${width}v${height}h${-width}z`);
  });
  const group = shape("g", { "shape-rendering": "crispEdges", class: "cells" });
  for (const [level, parts] of paths) {
    const look = level === "undefined" ? { class: "undefined", fill: "url(#hatch)" } : { fill: palette[level] };
    group.append(shape("path", { ...look, d: parts.join("") }));
  }
  return group;
}

function hatching(plan) {
  const pattern = (id, size, turn, parts) => shape("pattern", {
    id, width: size, height: size, patternUnits: "userSpaceOnUse", patternTransform: `rotate(${turn})`,
  }, parts.map(([className, x, width]) => shape("rect", { class: className, x, width, height: size })));
  const size = clamp(Math.min(plan.cellWidth, plan.cellHeight) / 3, 3, 8);
  return shape("defs", {}, [
    pattern("hatch", 6, 45, [["hatch-ground", 0, 6], ["hatch-line", 0, 2]]),
    // A light line beside a dark one is visible on every colour of the scale.
    pattern("chance", size, -45, [
      ["fade-ground", 0, size], ["fade-light", 0, size * 0.22], ["fade-dark", size * 0.22, size * 0.16],
    ]),
  ]);
}

// Cells whose value chance could have given: faded and striped, with their colour still visible.
function faded(grid, plan) {
  if (!grid.byChance) return null;
  const parts = [];
  grid.rows.forEach((_, i) => grid.columns.forEach((__, j) => {
    const { x, y, width, height } = box(plan, i, j);
    if (grid.byChance(i, j)) parts.push(`M${x} ${y}h${width}v${height}h${-width}z`);
  }));
  const place = plan.legendBelow ? { x: 0, y: 53 } : { x: BAR + 28, y: 17 };
  return shape("g", { class: "faded" }, [
    shape("path", { class: "by-chance", fill: "url(#chance)", d: parts.join("") }),
    shape("rect", { ...place, width: 22, height: 10, fill: palette[Math.round(LEVELS * 0.2)] }),
    shape("rect", { ...place, width: 22, height: 10, fill: "url(#chance)" }),
    shape("text", { class: "label quiet", x: place.x + 28, y: place.y + 9 }, NOT_CLEAR),
  ]);
}

// The best match of each row: a frame if it fits, else a dot.
function marks(grid, plan) {
  const group = shape("g", { class: "best" });
  grid.best.forEach((j, i) => {
    if (j === null) return;
    const { x, y, width, height } = box(plan, i, j);
    const stroke = inkOn(levelOf(grid.value[i * grid.columns.length + j], grid.ends));
    const size = Math.min(width, height);
    group.append(size >= 16
      ? shape("rect", { x: x + 1.5, y: y + 1.5, width: width - 3, height: height - 3, fill: "none", stroke })
      : shape("circle", { cx: x + width / 2, cy: y + height / 2, r: clamp(size * 0.22, 0.7, 2.5), fill: stroke }));
  });
  return group;
}

function printed(grid, plan) {
  const group = shape("g", { class: "numbers" });
  if (grid.value.length > 144 || plan.cellWidth < 33 || plan.cellHeight < 18) return group;
  const size = plan.cellWidth > 60 ? 13 : LABEL;
  grid.value.forEach((value, k) => {
    const [i, j] = [Math.floor(k / grid.columns.length), k % grid.columns.length];
    const { x, y, width, height } = box(plan, i, j);
    const text = value === null ? undefined : shortNumbers(value, grid.ends).find((t) => widthOf(t, size) <= width - 6);
    if (text === undefined) return;
    const level = levelOf(value, grid.ends);
    const halo = grid.byChance?.(i, j) ? { class: "halo", stroke: palette[level] } : {};
    group.append(shape("text", {
      x: x + width / 2, y: y + height / 2 + size * 0.36, "text-anchor": "middle", "font-size": size,
      fill: inkOn(level), ...halo,
    }, text));
  });
  return group;
}

// A value in the forms that may fit a cell, best first: two decimals; powers of ten if the whole scale is small.
function shortNumbers(value, [far, alike]) {
  if (Math.max(Math.abs(far), Math.abs(alike)) < 0.1) {
    return value === 0 ? ["0"] : [1, 0].map((digits) => value.toExponential(digits));
  }
  return [Math.abs(value) < 0.005 ? "0.00" : written(value, 2), ...(Math.abs(value) >= 1 ? [written(value, 0)] : [])];
}

function axes(grid, plan) {
  const group = shape("g", { class: "labels" });
  const step = every(plan.cellHeight, LABEL + 4);
  plan.side.texts.forEach((text, i) => {
    if (i % step) return;
    const y = plan.top + (i + 0.5) * plan.cellHeight;
    group.append(
      shape("line", { class: "tick", "data-row": i, x1: plan.left - 5, x2: plan.left - 1, y1: y, y2: y }),
      shape("text", { class: "label", "data-row": i, x: plan.left - 9, y: y + LABEL * 0.36, "text-anchor": "end" },
        [shape("title", {}, grid.rows[i]), text]),
    );
  });
  const under = plan.top + plan.mapHeight;
  const place = { left: plan.left, top: under, pitch: plan.cellWidth, leaning: plan.under.leaning };
  const name = (text, attributes, room) => shape("text", { class: "label axis", ...attributes },
    [shape("title", {}, text), shortened(text, room - 12)]);
  return shape("g", {}, [
    group,
    footLabels(plan.foot, place),
    name(`${grid.rowTitle} ↓`, { x: 0, y: plan.top - 13 }, plan.width),
    name(`${grid.columnTitle} →`, { x: plan.left, y: plan.height - 6 }, plan.width - plan.left),
  ]);
}
