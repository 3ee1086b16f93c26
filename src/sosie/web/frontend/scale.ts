// From a value to a colour; "alike" is always the bright end.

import { colours, type Ends, levelOf, shape } from "./shared.js";

export { type Ends, inkOn, levelOf } from "./shared.js";

let ramp: string[] = [];
let palette: string[] = [];

export function useRamp(stops: string[]): void {
  [ramp, palette] = [stops, colours(stops)];
}

export function colourOf(value: number, ends: Ends): string {
  return palette[levelOf(value, ends)];
}

export function colourAt(level: number): string {
  return palette[level];
}

export function colourBar(title: string, [far, alike]: Ends, width: number): SVGGElement {
  const id = `ramp-${Math.random().toString(36).slice(2)}`;
  const stops = ramp.map((hex, k) => shape("stop", { offset: k / (ramp.length - 1), "stop-color": hex }));
  const text = (x: number, y: number, anchor: string, said: string, className = "label") =>
    shape("text", { class: className, x, y, "text-anchor": anchor }, said);
  const short = (value: number) => String(Number(value.toPrecision(3)));
  return shape("g", {}, [
    shape("defs", {}, shape("linearGradient", { id }, stops)),
    text(0, 10, "start", "unlike", "label quiet"), text(width / 2, 10, "middle", title),
    text(width, 10, "end", "alike", "label quiet"),
    shape("rect", { x: 0, y: 17, width, height: 10, rx: 2, fill: `url(#${id})` }),
    text(0, 42, "start", short(far)), text(width / 2, 42, "middle", short((far + alike) / 2)), text(width, 42, "end", short(alike)),
  ]);
}
