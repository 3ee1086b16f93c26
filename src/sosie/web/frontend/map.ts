// Models as points on a canvas: moved, zoomed, pointed at, walked with arrow keys.

import type { Point } from "./api.js";
import { announce, clamp, element, named, redrawn, visible } from "./dom.js";
import type { Grouping } from "./groups.js";
import { shortened } from "./heatmap.js";
import { listen, neighbour } from "./map_pointing.js";
import { type Pen, svgPen } from "./pen.js";
import { placedLabels, shape } from "./shared.js";
import { hideTip, showTip } from "./tip.js";

interface View { scale: number; x: number; y: number } // screen = scale · point + (x, y)
export interface MapOptions {
  height: (width: number) => number;
  lines: boolean; // from a model to the one it was fine-tuned from
  open: (point: Point) => void;
  marked?: Set<number>; // drawn larger, with names; the rest fades
  centre?: number; // id of the one that it is about
  sent?: { name: string; x: number; y: number }; // a model that is not in the zoo
}
export interface ModelMap {
  host: HTMLElement;
  regroup: (grouping: Grouping, only: number | null) => void;
  mark: (ids: Set<number> | null) => void;
  setLines: (lines: boolean) => void;
  zoom: (factor: number) => void;
  fit: () => void;
  drawing: () => SVGSVGElement; // what is in sight, to be saved
}

const REACH = 16; // px from the pointer
const MOST_NAMES = 60;
const MARGIN = 36;

export function modelMap(points: Point[], start: Grouping, options: MapOptions): ModelMap {
  const canvas = element("canvas", {
    class: "points", tabindex: 0, role: "application",
    "aria-label": `Map of ${points.length} models; arrow keys go from one to the next, Enter opens it`,
  });
  const host = element("div", { class: "map" }, canvas);
  const screen = canvas.getContext("2d")!;
  let context: Pen = screen;
  const parents = linesOf(points);
  let [grouping, only, lines]: [Grouping, number | null, boolean] = [start, null, options.lines];
  let [width, height, base, view]: [number, number, View, View] = [0, 0, { scale: 1, x: 0, y: 0 }, { scale: 1, x: 0, y: 0 }];
  let marked = options.marked ?? null;
  let hovered: Point | null = null;
  let waiting = false;

  const at = (point: { x: number; y: number }): [number, number] => [point.x * view.scale + view.x, -point.y * view.scale + view.y];
  const faded = (point: Point) =>
    (only !== null && grouping.of(point) !== only) || (marked !== null && !marked.has(point.id));
  const draw = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      const ratio = window.devicePixelRatio || 1;
      screen.setTransform(ratio, 0, 0, ratio, 0, 0);
      screen.clearRect(0, 0, width, height);
      paint();
    });
  };

  function drawing(): SVGSVGElement {
    const svg = shape("svg", { class: "numbers", width, height, viewBox: `0 0 ${width} ${height}` });
    context = svgPen(svg, screen);
    paint();
    context = screen;
    return svg;
  }

  function paint(): void {
    const style = getComputedStyle(host);
    const ink = (name: string) => style.getPropertyValue(name).trim();
    const colours = grouping.groups.map((group) => (group.colour === null ? ink("--grey") : ink(`--group-${group.colour}`)));
    if (lines) {
      context.strokeStyle = ink("--quiet");
      context.lineWidth = 1;
      for (const [child, parent] of parents) {
        context.globalAlpha = faded(child) && faded(parent) ? 0.08 : 0.4;
        context.beginPath();
        context.moveTo(...at(child));
        context.lineTo(...at(parent));
        context.stroke();
      }
    }
    const radius = clamp(7 - Math.log10(points.length + 1) * 1.5, 2.5, 6) * clamp((view.scale / base.scale) ** 0.25, 1, 1.8);
    const ordered = [...points].sort((a, b) => Number(faded(b)) - Number(faded(a)));
    for (const point of ordered) dot(point, colours[grouping.of(point)], radius, ink);
    names(ordered.filter((point) => !faded(point)), radius, ink);
    if (options.sent) stranger(options.sent, radius, ink);
    context.globalAlpha = 1;
  }

  // What was sent: another shape than all models, on top of them, with its name.
  function stranger(sent: { name: string; x: number; y: number }, radius: number, ink: (name: string) => string): void {
    const [x, y] = at(sent);
    const size = radius + 5;
    context.globalAlpha = 1;
    context.beginPath();
    for (const [dx, dy] of [[0, -size], [size, 0], [0, size], [-size, 0]]) context.lineTo(x + dx, y + dy);
    context.closePath();
    context.fillStyle = ink("--second");
    context.fill();
    context.lineWidth = 2.5;
    context.lineJoin = "round";
    context.strokeStyle = ink("--ink");
    context.stroke();
  }

  function dot(point: Point, colour: string, radius: number, ink: (name: string) => string): void {
    const [x, y] = at(point);
    if (x < -20 || y < -20 || x > width + 20 || y > height + 20) return;
    const special = point === hovered || point.id === options.centre;
    context.globalAlpha = faded(point) && !special ? 0.16 : 1;
    context.beginPath();
    context.arc(x, y, special ? radius + 2.5 : radius, 0, 2 * Math.PI);
    context.fillStyle = colour;
    context.fill();
    context.lineWidth = special ? 2.5 : 1;
    context.strokeStyle = special ? ink("--ink") : ink("--surface");
    context.stroke();
  }

  // Names beside points, none on another; not at all where too many are in sight.
  function names(shown: Point[], radius: number, ink: (name: string) => string): void {
    const inside = shown.filter((point) => {
      const [x, y] = at(point);
      return x > 0 && y > 0 && x < width && y < height;
    });
    if (inside.length > MOST_NAMES) return;
    context.font = `11.5px ${getComputedStyle(document.body).fontFamily}`;
    context.textBaseline = "middle";
    context.globalAlpha = 1;
    inside.sort((a, b) => Number(b.id === options.centre) - Number(a.id === options.centre));
    const written = inside.map((point) => ({ name: point.name, x: point.x, y: point.y, first: point.id === options.centre }));
    if (options.sent) written.unshift({ ...options.sent, first: true });
    const texts = written.map((point) => shortened(point.name, 150));
    const widths = texts.map((text) => context.measureText(text).width);
    placedLabels(written.map(at), widths, { width, height, radius: options.sent ? radius + 3 : radius }).forEach((label, k) => {
      if (label === null) return;
      if (label.far) {
        context.lineWidth = 1;
        context.strokeStyle = ink("--quiet");
        context.beginPath();
        context.moveTo(...label.from);
        context.lineTo(...label.to);
        context.stroke();
      }
      context.lineWidth = 3;
      context.lineJoin = "round";
      context.strokeStyle = ink("--surface");
      context.strokeText(texts[k], label.x, label.y);
      context.fillStyle = ink(written[k].first ? "--ink" : "--quiet");
      context.fillText(texts[k], label.x, label.y);
    });
  }

  function fit(): void {
    const all = options.sent ? [...points, options.sent] : points;
    const [xs, ys] = [all.map((p) => p.x), all.map((p) => p.y)];
    const [left, right, low, high] = [least(xs), most(xs), least(ys), most(ys)];
    // Rounding (below 0.001) does not drive points apart.
    const scale = Math.min((width - 2 * MARGIN) / Math.max(right - left, 0.01), (height - 2 * MARGIN) / Math.max(high - low, 0.01));
    base = { scale, x: width / 2 - (scale * (left + right)) / 2, y: height / 2 + (scale * (low + high)) / 2 };
    view = { ...base };
    moved();
  }

  function moved(): void {
    canvas.classList.toggle("zoomed", view.scale > base.scale * 1.01);
    draw();
  }

  function zoom(factor: number, x = width / 2, y = height / 2): void {
    const scale = clamp(view.scale * factor, base.scale * 0.5, base.scale * 400);
    view = { scale, x: x - ((x - view.x) * scale) / view.scale, y: y - ((y - view.y) * scale) / view.scale };
    moved();
  }

  function nearest(x: number, y: number): Point | null {
    let [found, best]: [Point | null, number] = [null, REACH ** 2];
    for (const point of points) {
      const [px, py] = at(point);
      const far = (px - x) ** 2 + (py - y) ** 2;
      if (far < best && !(only !== null && faded(point))) [found, best] = [point, far];
    }
    return found;
  }

  function hover(point: Point | null, x = 0, y = 0): void {
    if (point !== hovered) {
      hovered = point;
      canvas.classList.toggle("over", point !== null);
      draw();
    }
    if (point === null) hideTip();
    else showTip(described(point), x, y);
  }

  redrawn(host, (now) => {
    [width, height] = [now, options.height(now)];
    const ratio = window.devicePixelRatio || 1;
    [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
    fit();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  listen(canvas, {
    zoom, hover, nearest,
    pan: (dx, dy) => { view = { ...view, x: view.x + dx, y: view.y + dy }; moved(); },
    open: () => { if (hovered) options.open(hovered); },
    step: (dx, dy) => {
      const next = hovered ? neighbour(points.filter((p) => !faded(p)), hovered, dx, dy) : points.find((p) => !faded(p)) ?? null;
      if (!next) return;
      const [x, y] = at(next);
      const area = canvas.getBoundingClientRect();
      hover(next, area.left + x, area.top + y);
      announce(`${visible(next.name)}, ${visible(next.architecture)}`);
    },
  });
  return {
    host, fit, drawing, zoom: (factor) => zoom(factor),
    regroup: (next, group) => { [grouping, only] = [next, group]; draw(); },
    setLines: (next) => { lines = next; draw(); },
    mark: (ids) => { marked = ids; draw(); },
  };
}

function described(point: Point): Node[] {
  const facts: [string, string | null][] = [
    ["", point.architecture], ["trained for ", point.task], ["from ", point.parent],
    ["", point.tags.length ? point.tags.map(visible).join(" · ") : null],
  ];
  return [
    element("p", { class: "tip-name" }, named(point.name)),
    ...facts.filter(([, text]) => text !== null).map(([head, text]) => element("p", { class: "quiet" }, [head, visible(text!)])),
  ];
}

export function linesOf(points: Point[]): [child: Point, parent: Point][] {
  const byName = new Map(points.map((point) => [point.name, point]));
  return points.flatMap((child): [Point, Point][] => {
    const parent = child.parent === null ? undefined : byName.get(child.parent);
    return parent && parent !== child ? [[child, parent]] : [];
  });
}

const least = (values: number[]) => values.reduce((a, b) => Math.min(a, b), Infinity);
const most = (values: number[]) => values.reduce((a, b) => Math.max(a, b), -Infinity);
