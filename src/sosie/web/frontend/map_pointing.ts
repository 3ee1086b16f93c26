// The map under pointers, wheels and keys.

import type { Point } from "./api.js";

export interface Acts {
  zoom: (factor: number, x: number, y: number) => void; pan: (dx: number, dy: number) => void;
  nearest: (x: number, y: number) => Point | null; hover: (point: Point | null, x?: number, y?: number) => void;
  open: () => void; step: (dx: number, dy: number) => void;
}

export function listen(canvas: HTMLCanvasElement, acts: Acts): void {
  let [dragging, travelled]: [PointerEvent | null, number] = [null, 0];
  const place = (event: PointerEvent | WheelEvent | MouseEvent): [number, number] => {
    const area = canvas.getBoundingClientRect();
    return [event.clientX - area.left, event.clientY - area.top];
  };
  canvas.addEventListener("pointerdown", (event) => {
    [dragging, travelled] = [event, 0];
    if (event.pointerType !== "touch" || canvas.classList.contains("zoomed")) canvas.setPointerCapture(event.pointerId);
    if (event.pointerType === "touch") acts.hover(acts.nearest(...place(event)), event.clientX, event.clientY);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (dragging && event.buttons) {
      travelled += Math.hypot(event.movementX, event.movementY);
      acts.pan(event.clientX - dragging.clientX, event.clientY - dragging.clientY);
      dragging = event;
      if (travelled > 6) acts.hover(null);
    } else acts.hover(acts.nearest(...place(event)), event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerup", () => { dragging = null; });
  canvas.addEventListener("pointercancel", () => { dragging = null; });
  canvas.addEventListener("pointerleave", () => acts.hover(null));
  canvas.addEventListener("blur", () => acts.hover(null));
  canvas.addEventListener("click", () => { if (travelled <= 6) acts.open(); });
  // Scrolling past the map goes on scrolling; a pinch, or the wheel once the map was clicked, zooms.
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== canvas) return;
    event.preventDefault();
    acts.zoom(2 ** (-event.deltaY / (event.ctrlKey ? 60 : 240)), ...place(event));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [0, 1], ArrowDown: [0, -1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[event.key];
    if (step) acts.step(step[0], step[1]);
    else if (event.key === "Enter") acts.open();
    else return;
    event.preventDefault();
  });
}

// The next point in a direction: near, and not far off to the side.
export function neighbour(points: Point[], from: Point, dx: number, dy: number): Point | null {
  let [found, best]: [Point | null, number] = [null, Infinity];
  for (const point of points) {
    const [ahead, aside] = [(point.x - from.x) * dx + (point.y - from.y) * dy, Math.abs((point.x - from.x) * dy) + Math.abs((point.y - from.y) * dx)];
    const cost = ahead + 2 * aside;
    if (ahead > 1e-9 && cost < best) [found, best] = [point, cost];
  }
  return found;
}
