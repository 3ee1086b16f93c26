// A heat map: A's layers are rows, from the first at the top; B's are columns, from the first at the left.

const HEAD = 78; // px above the cells: colour bar and the name of the rows

function heatmap(grid) {
  const host = redrawn(element("div", { class: "map" }), (width) => {
    const plan = arrange(grid, width);
    const svg = shape("svg", {
      class: "heatmap", role: "application", tabindex: 0, width: plan.width, height: plan.height,
      viewBox: `0 0 ${plan.width} ${plan.height}`, "aria-label": grid.label,
    }, [hatching(), bar(grid, plan), cells(grid, plan), marks(grid, plan), printed(grid, plan), axes(grid, plan)]);
    host.replaceChildren(svg);
    pointing(svg, grid, plan);
  });
  return host;
}

// Cells as large as the width allows, not taller than the screen, never so flat or thin that they vanish.
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
  const height = Math.ceil(HEAD + mapHeight + under.height + 26);
  return { width, height, left, top: HEAD, cellWidth, cellHeight, mapWidth, mapHeight, side, foot, under };
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

// One path a colour instead of one element a cell: 256 elements draw 25 000 cells.
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

function hatching() {
  const pattern = { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" };
  return shape("defs", {}, shape("pattern", pattern, [
    shape("rect", { class: "hatch-ground", width: 6, height: 6 }),
    shape("rect", { class: "hatch-line", width: 2, height: 6 }),
  ]));
}

// The best match of each row: a frame where there is room for one, else a dot.
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
    const { x, y, width, height } = box(plan, Math.floor(k / grid.columns.length), k % grid.columns.length);
    if (value === null || widthOf(written(value, 2), size) > width - 6) return;
    group.append(shape("text", {
      x: x + width / 2, y: y + height / 2 + size * 0.36, "text-anchor": "middle", "font-size": size,
      fill: inkOn(levelOf(value, grid.ends)),
    }, written(value, 2)));
  });
  return group;
}

function bar(grid, plan) {
  return colourBar(grid, grid.ends, plan.width - 2);
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
    name(`${grid.rowTitle} ↓`, { x: 0, y: HEAD - 13 }, plan.width),
    name(`${grid.columnTitle} →`, { x: plan.left, y: plan.height - 6 }, plan.width - plan.left),
  ]);
}
