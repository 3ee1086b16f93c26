// From a value to a colour; "alike" is always the bright end.
import { colours, levelOf, shape } from "./shared.js";
export { inkOn, levelOf } from "./shared.js";
let ramp = [];
let palette = [];
export function useRamp(stops) {
    [ramp, palette] = [stops, colours(stops)];
}
export function colourOf(value, ends) {
    return palette[levelOf(value, ends)];
}
export function colourAt(level) {
    return palette[level];
}
export function colourBar(title, [far, alike], width) {
    const id = `ramp-${Math.random().toString(36).slice(2)}`;
    const stops = ramp.map((hex, k) => shape("stop", { offset: k / (ramp.length - 1), "stop-color": hex }));
    const text = (x, y, anchor, said, className = "label") => shape("text", { class: className, x, y, "text-anchor": anchor }, said);
    const short = (value) => String(Number(value.toPrecision(3)));
    return shape("g", {}, [
        shape("defs", {}, shape("linearGradient", { id }, stops)),
        text(0, 10, "start", "unlike", "label quiet"), text(width / 2, 10, "middle", title),
        text(width, 10, "end", "alike", "label quiet"),
        shape("rect", { x: 0, y: 17, width, height: 10, rx: 2, fill: `url(#${id})` }),
        text(0, 42, "start", short(far)), text(width / 2, 42, "middle", short((far + alike) / 2)), text(width, 42, "end", short(alike)),
    ]);
}
