// Sites of one model are rows, from the first at the top; those of the other are columns, from the first at the left.

import { announce, clamp, element, named, redrawn, shape, visible, written } from "./dom.js";
import { downloads, type Lines } from "./download.js";
import { shortened as cut, widthOf as width12 } from "./shared.js";
import { colourAt, colourBar, inkOn, levelOf, type Ends } from "./scale.js";
import { hideTip, showTip } from "./tip.js";

export interface Grid {
  title: string; rowTitle: string; columnTitle: string; rows: string[]; columns: string[];
  value: (number | null)[][]; ends: Ends; closer?: "up" | "down"; best?: boolean; current?: number; wide?: boolean;
  pick?: (row: number, column: number) => void;
}
interface Plan { width: number; height: number; left: number; top: number; cellWidth: number; cellHeight: number; side: string[] }

const HEAD = 76; // px above the cells: colour bar and the name of the rows
const LABEL = 12;
const widthOf = (text: string) => width12(text, LABEL);

export function shortened(text: string, room: number): string {
  return cut(visible(text), room, LABEL);
}

export interface Drawn { host: HTMLElement; saves: (...names: string[]) => HTMLElement; update: (grid: Grid) => void }

export function heatmap(first: Grid): Drawn {
  let grid = first;
  const host = redrawn(element("div", { class: "map" }), (width) => {
    const plan = arrange(grid, width);
    const svg = shape("svg", {
      class: "heatmap", role: "application", tabindex: 0, width: plan.width, height: plan.height,
      viewBox: `0 0 ${plan.width} ${plan.height}`,
      "aria-label": `${grid.title}: ${grid.rows.length} by ${grid.columns.length} cells; arrow keys read them`,
    }, [colourBar(grid.title, grid.ends, Math.min(plan.width - 2, 300)), cells(grid, plan), marks(grid, plan), printed(grid, plan), axes(grid, plan)]);
    host.replaceChildren(svg);
    pointing(svg, grid, plan);
  });
  const table = (): Lines => [["row", "column", "value"],
    ...grid.value.flatMap((row, i) => row.map((value, j) => [grid.rows[i], grid.columns[j], value]))];
  return {
    host, saves: (...names) => downloads(names, table, () => host.querySelector("svg")!),
    update: (next) => { grid = next; host.redraw(); },
  };
}

function arrange(grid: Grid, width: number): Plan {
  const [rows, columns] = [grid.rows.length, grid.columns.length];
  const room = clamp(width * 0.26, 56, 190);
  const side = grid.rows.map((site) => shortened(site, room));
  const left = Math.ceil(Math.max(...side.map(widthOf), 20)) + 14;
  const largest = clamp(520 / Math.max(rows, columns), 44, 96);
  const widest = Math.min((width - left - 2) / columns, 96);
  const lowest = rows <= 24 ? LABEL + 5 : 5;
  const cellHeight = clamp(grid.wide ? 26 : widest, lowest, Math.max(Math.min(largest, 720 / rows), lowest));
  const cellWidth = grid.wide ? widest : Math.min(widest, Math.max(1.8 * cellHeight, 84 / columns));
  const foot = footHeight(grid, cellWidth);
  return { width, left, side, cellWidth, cellHeight, top: HEAD, height: Math.ceil(HEAD + cellHeight * rows + foot + 26) };
}

function upright(grid: Grid, cellWidth: number): boolean {
  return Math.max(...grid.columns.map((site) => widthOf(shortened(site, 120)))) < cellWidth - 6;
}

function footHeight(grid: Grid, cellWidth: number): number {
  if (upright(grid, cellWidth)) return LABEL + 12;
  return Math.max(...grid.columns.map((site) => widthOf(shortened(site, 120)))) * 0.82 + 22;
}

function box(plan: Plan, i: number, j: number) {
  const gap = Math.min(plan.cellWidth, plan.cellHeight) >= 11 ? 1 : 0;
  const snap = (value: number) => Math.round(value * 2) / 2;
  const x = snap(plan.left + j * plan.cellWidth);
  const y = snap(plan.top + i * plan.cellHeight);
  const width = snap(plan.left + (j + 1) * plan.cellWidth) - x - gap;
  return { x, y, width, height: snap(plan.top + (i + 1) * plan.cellHeight) - y - gap };
}

// One path a colour instead of one element a cell.
function cells(grid: Grid, plan: Plan): SVGGElement {
  const paths = new Map<number | null, string[]>();
  grid.value.forEach((row, i) => row.forEach((value, j) => {
    const level = value === null ? null : levelOf(value, grid.ends);
    const { x, y, width, height } = box(plan, i, j);
    if (!paths.has(level)) paths.set(level, []);
    paths.get(level)!.push(`M${x} ${y}h${width}v${height}h${-width}z`);
  }));
  return shape("g", { "shape-rendering": "crispEdges", class: "cells" }, [...paths].map(([level, parts]) =>
    shape("path", { d: parts.join(""), ...(level === null ? { class: "undefined" } : { fill: colourAt(level) }) })));
}

export function bestOf(row: (number | null)[], closer: "up" | "down" = "up"): number | null {
  let best: number | null = null;
  row.forEach((value, j) => {
    if (value === null) return;
    if (best === null || (closer === "up" ? value > row[best]! : value < row[best]!)) best = j;
  });
  return best;
}

// The best match of each row: a frame where there is room for one, else a dot. Or the column that is looked at.
function marks(grid: Grid, plan: Plan): SVGGElement {
  const group = shape("g", { class: "best" });
  if (grid.best) grid.value.forEach((row, i) => {
    const j = bestOf(row, grid.closer);
    if (j === null) return;
    const { x, y, width, height } = box(plan, i, j);
    const stroke = inkOn(levelOf(row[j]!, grid.ends));
    const size = Math.min(width, height);
    group.append(size >= 16
      ? shape("rect", { x: x + 1.5, y: y + 1.5, width: width - 3, height: height - 3, fill: "none", stroke })
      : shape("circle", { cx: x + width / 2, cy: y + height / 2, r: clamp(size * 0.22, 0.7, 2.5), fill: stroke }));
  });
  if (grid.current !== undefined) {
    const first = box(plan, 0, grid.current);
    const height = plan.cellHeight * grid.rows.length;
    group.append(shape("rect", { class: "current", x: first.x - 1.5, y: plan.top - 1.5, width: Math.max(first.width, 2) + 3, height: height + 2 }));
  }
  return group;
}

function printed(grid: Grid, plan: Plan): SVGGElement {
  const group = shape("g", { class: "numbers" });
  if (plan.cellWidth < 34 || plan.cellHeight < 18 || grid.rows.length * grid.columns.length > 400) return group;
  grid.value.forEach((row, i) => row.forEach((value, j) => {
    if (value === null) return;
    const { x, y, width, height } = box(plan, i, j);
    const text = Math.abs(value) < 0.005 ? "0.00" : written(value, 2);
    group.append(shape("text", {
      x: x + width / 2, y: y + height / 2 + 4, "text-anchor": "middle", "font-size": LABEL, fill: inkOn(levelOf(value, grid.ends)),
    }, text));
  }));
  return group;
}

function axes(grid: Grid, plan: Plan): SVGGElement {
  const group = shape("g", { class: "labels" });
  const every = (pitch: number) => Math.max(Math.ceil((LABEL + 3) / pitch), 1);
  plan.side.forEach((text, i) => {
    if (i % every(plan.cellHeight)) return;
    const y = plan.top + (i + 0.5) * plan.cellHeight + LABEL * 0.36;
    group.append(shape("text", { class: "label", x: plan.left - 9, y, "text-anchor": "end", "data-row": i },
      [shape("title", {}, visible(grid.rows[i])), text]));
  });
  const under = plan.top + plan.cellHeight * grid.rows.length;
  const straight = upright(grid, plan.cellWidth);
  const step = straight ? 1 : every(plan.cellWidth);
  grid.columns.forEach((site, j) => {
    if (j % step) return;
    const x = plan.left + (j + 0.5) * plan.cellWidth;
    const place = straight
      ? { x, y: under + LABEL + 5, "text-anchor": "middle" }
      : { "text-anchor": "end", transform: `translate(${x + 4} ${under + 13}) rotate(-55)` };
    group.append(shape("text", { class: "label", "data-column": j, ...place }, [shape("title", {}, visible(site)), shortened(site, 120)]));
  });
  group.append(
    shape("text", { class: "label axis", x: 0, y: plan.top - 12 }, shortened(`${grid.rowTitle} ↓`, plan.width - 12)),
    shape("text", { class: "label axis", x: plan.left, y: plan.height - 6 }, shortened(`${grid.columnTitle} →`, plan.width - plan.left - 12)),
  );
  return group;
}

function pointing(svg: SVGSVGElement, grid: Grid, plan: Plan): void {
  const cursor = shape("rect", { class: "cursor", visibility: "hidden" });
  svg.append(cursor);
  let at: [number, number] | null = null;
  const said = (i: number, j: number) => written(grid.value[i][j]);
  const show = (i: number, j: number, x: number, y: number) => {
    at = [i, j];
    const cell = box(plan, i, j);
    for (const [name, value] of Object.entries({ x: cell.x, y: cell.y, width: cell.width, height: cell.height, visibility: "visible" })) {
      cursor.setAttribute(name, String(value));
    }
    showTip([
      element("p", { class: "tip-value" }, said(i, j)),
      element("p", {}, [element("span", { class: "quiet" }, "↓ "), named(grid.rows[i])]),
      element("p", {}, [element("span", { class: "quiet" }, "→ "), named(grid.columns[j])]),
    ], x, y);
  };
  const hide = () => {
    hideTip();
    cursor.setAttribute("visibility", "hidden");
  };
  const under = (event: PointerEvent): [number, number] | null => {
    const area = svg.getBoundingClientRect();
    const j = Math.floor((event.clientX - area.left - plan.left) / plan.cellWidth);
    const i = Math.floor((event.clientY - area.top - plan.top) / plan.cellHeight);
    return i >= 0 && j >= 0 && i < grid.rows.length && j < grid.columns.length ? [i, j] : null;
  };
  svg.addEventListener("pointermove", (event) => {
    const cell = under(event);
    if (cell) show(...cell, event.clientX, event.clientY);
    else hide();
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("click", (event) => {
    const cell = under(event as PointerEvent);
    if (cell) grid.pick?.(...cell);
  });
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    const [i, j] = at ? [clamp(at[0] + move[0], 0, grid.rows.length - 1), clamp(at[1] + move[1], 0, grid.columns.length - 1)] : [0, 0];
    const area = svg.getBoundingClientRect();
    show(i, j, area.left + plan.left + (j + 1) * plan.cellWidth, area.top + plan.top + (i + 1) * plan.cellHeight);
    announce(`${visible(grid.rows[i])} and ${visible(grid.columns[j])}: ${said(i, j)}`);
  });
}
