// Files made by the page itself, to be saved.

const MARGIN = 20; // px around a saved drawing

function save(blob, name) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function fileName(found, suffix) {
  const plain = (text) => text.replace(/[^A-Za-z0-9_.-]+/g, "-").replace(/^[-.]+|[-.]+$/g, "").slice(0, 40) || "model";
  return `${plain(found.a.name)}-${plain(found.b.name)}-${plain(found.measure.name)}.${suffix}`;
}

// Quoted, and with a leading mark if a spreadsheet would read a name as a formula.
function csvText(text) {
  return `"${(/^[=+\-@\t\r]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
}

// All digits that the page holds.
function plainNumber(value) {
  return value === null ? "" : Number(value.toPrecision(7));
}

function csv(found) {
  const kinds = [...KINDS, "score"].filter((kind) => found.measure[kind]);
  const lines = [["site_a", "site_b", ...kinds, "caveats"].join(",")];
  found.a.sites.forEach((siteA, i) => found.b.sites.forEach((siteB, j) => {
    const numbers = kinds.map((kind) => plainNumber(found.at(kind, i, j)));
    lines.push([csvText(siteA), csvText(siteB), ...numbers, csvText(found.notes(i, j).join("; "))].join(","));
  }));
  return `${lines.join("\r\n")}\r\n`;
}

// A drawing that no longer needs the page's style sheet.
function standalone(svg) {
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
  const [width, height] = [svg.clientWidth + 2 * MARGIN, svg.clientHeight + 2 * MARGIN];
  const place = { x: -MARGIN, y: -MARGIN, width, height };
  filled(copy, { width, height, viewBox: Object.values(place).join(" ") });
  copy.prepend(shape("rect", { ...place, fill: getComputedStyle(document.body).backgroundColor }));
  return new XMLSerializer().serializeToString(copy);
}

function saveSvg(svg, name) {
  save(new Blob([standalone(svg)], { type: "image/svg+xml" }), name);
}

function savePng(svg, name) {
  const image = new Image();
  const [width, height] = [svg.clientWidth + 2 * MARGIN, svg.clientHeight + 2 * MARGIN];
  image.addEventListener("load", () => {
    const canvas = element("canvas", { width: width * 2, height: height * 2 });
    canvas.getContext("2d").drawImage(image, 0, 0, width * 2, height * 2);
    canvas.toBlob((blob) => save(blob, name), "image/png");
  });
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(standalone(svg))}`;
}
