// Draws shapes where a canvas would paint: what a map is saved as. It knows what map.ts uses of a canvas.
import { shape } from "./shared.js";
export function svgPen(svg, ruler) {
    let path = "";
    const line = () => ({ fill: "none", stroke: String(pen.strokeStyle), "stroke-width": pen.lineWidth, "stroke-linejoin": pen.lineJoin });
    const add = (tag, attributes, text) => svg.append(shape(tag, { opacity: pen.globalAlpha, ...attributes }, text));
    const write = (text, x, y, ink) => add("text", { x, y: y + 4, "font-size": 11.5, ...ink }, text);
    const pen = {
        globalAlpha: 1, fillStyle: "", strokeStyle: "", lineWidth: 1, lineJoin: "miter", font: "", textBaseline: "middle",
        beginPath: () => { path = ""; },
        moveTo: (x, y) => { path += `M${x.toFixed(1)} ${y.toFixed(1)}`; },
        lineTo: (x, y) => { path += `${path ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`; },
        arc: (x, y, r) => { path += `M${(x - r).toFixed(1)} ${y.toFixed(1)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`; },
        closePath: () => { path += "Z"; },
        fill: () => add("path", { d: path, fill: String(pen.fillStyle) }),
        stroke: () => add("path", { d: path, ...line() }),
        fillText: (text, x, y) => write(text, x, y, { fill: String(pen.fillStyle) }),
        strokeText: (text, x, y) => write(text, x, y, line()),
        measureText: (text) => ruler.measureText(text),
    };
    return pen;
}
