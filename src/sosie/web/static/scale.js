// From a value to a colour; "alike" is always the bright end.
import { clamp, shape } from "./dom.js";
export const LEVELS = 256;
let ramp = [];
let palette = [];
export function useRamp(stops) {
    ramp = stops;
    const parts = stops.map((hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16)));
    palette = Array.from({ length: LEVELS }, (_, level) => {
        const at = (level / (LEVELS - 1)) * (parts.length - 1);
        const k = Math.min(Math.floor(at), parts.length - 2);
        return `rgb(${parts[k].map((from, c) => Math.round(from + (at - k) * (parts[k + 1][c] - from))).join(",")})`;
    });
}
export function levelOf(value, [far, alike]) {
    return Math.round(clamp((value - far) / (alike - far), 0, 1) * (LEVELS - 1));
}
export function colourOf(value, ends) {
    return palette[levelOf(value, ends)];
}
export function colourAt(level) {
    return palette[level];
}
// The ramp's lightness only rises, so one threshold decides which ink reads better on it.
export function inkOn(level) {
    return level > 0.42 * LEVELS ? "#10131c" : "#f6f7fb";
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
