// Files made by the page itself, to be saved: of the report's pages and of the explorer. Types: frontend/download.d.ts.

import { element, filled, shape } from "./shared.js";

const MARGIN = 20; // px around a saved drawing

function save(blob, name) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function plainName(text) {
  return text.replace(/[^A-Za-z0-9_.-]+/g, "-").replace(/^[-.]+|[-.]+$/g, "").slice(0, 40) || "model";
}

// Buttons that save a figure: its numbers, heads first, and if there is a drawing the drawing.
export function downloads(names, lines, drawing = null) {
  const file = (suffix) => `${names.map(plainName).join("-")}.${suffix}`;
  const kinds = [["CSV", () => save(new Blob([csv(lines())], { type: "text/csv" }), file("csv"))]];
  if (drawing) kinds.push(["SVG", () => saveSvg(drawing(), file("svg"))], ["PNG", () => savePng(drawing(), file("png"))]);
  return element("span", { class: "downloads" }, ["Download ", ...kinds.map(([name, click]) =>
    element("button", { type: "button", class: "plain", click, title: `Download ${name}` }, name))]);
}

// Quoted, and with a leading mark if a spreadsheet would read a name as a formula.
function csvText(text) {
  return `"${(/^[=+\-@\t\r]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
}

// All digits that the page holds.
function csvCell(value) {
  if (value === null || value === undefined) return "";
  return typeof value === "number" ? Number(value.toPrecision(7)) : csvText(String(value));
}

function csv([heads, ...lines]) {
  return [heads.join(","), ...lines.map((line) => line.map(csvCell).join(",")), ""].join("\r\n");
}

// A drawing that no longer needs the page's style sheet.
function standalone(svg) {
  const loose = !svg.isConnected;
  if (loose) document.querySelector("main").append(svg); // styles are only known of what is in the page
  const copy = svg.cloneNode(true);
  const looks = [
    "fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "paint-order",
    "font-family", "font-size", "font-weight",
  ];
  const originals = svg.querySelectorAll("*");
  copy.querySelectorAll("*").forEach((node, k) => {
    const style = getComputedStyle(originals[k]);
    if (node.closest("defs, text, line, rect, path, circle")) {
      for (const look of looks) if (!style[look]?.startsWith("url")) node.setAttribute(look, style[look]);
    }
    node.removeAttribute("class");
  });
  copy.querySelectorAll("[visibility=hidden]").forEach((node) => node.remove());
  if (loose) svg.remove();
  const [width, height] = outer(svg);
  const place = { x: -MARGIN, y: -MARGIN, width, height };
  filled(copy, { width, height, viewBox: Object.values(place).join(" ") });
  copy.prepend(shape("rect", { ...place, fill: getComputedStyle(document.body).backgroundColor }));
  return new XMLSerializer().serializeToString(copy);
}

function outer(svg) {
  return ["width", "height"].map((side) => Number(svg.getAttribute(side)) + 2 * MARGIN);
}

function saveSvg(svg, name) {
  save(new Blob([standalone(svg)], { type: "image/svg+xml" }), name);
}

function savePng(svg, name) {
  const image = new Image();
  const [width, height] = outer(svg);
  image.addEventListener("load", () => {
    const canvas = element("canvas", { width: width * 2, height: height * 2 });
    canvas.getContext("2d").drawImage(image, 0, 0, width * 2, height * 2);
    canvas.toBlob((blob) => save(blob, name), "image/png");
  });
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(standalone(svg))}`;
}
