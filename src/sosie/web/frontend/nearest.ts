// Tables of what is nearest: models, or layers.

import type { Near, Nearest } from "./api.js";
import { chips, element, link, modelLink, named, visible, written } from "./dom.js";
import { colourOf } from "./scale.js";

export function bar(value: number): HTMLElement {
  const filled = element("span", { class: "bar-filled" });
  filled.style.width = `${Math.max(0, Math.min(value, 1)) * 100}%`;
  filled.style.background = colourOf(value, [0, 1]);
  return element("span", { class: "bar", "aria-hidden": "true" }, filled);
}

export function nearestTable(found: Nearest, compare: ((row: Near) => string) | null): HTMLElement {
  if (!found.rows.length) return element("p", { class: "quiet" }, "Nothing else in the zoo can be compared with it.");
  const layers = found.by === "layer";
  const head = ["", "model", layers ? "layer" : null, found.what, layers ? null : "architecture", layers ? null : "tags", compare ? "" : null];
  const rows = found.rows.map((row, k) => element("tr", {}, [
    element("td", { class: "number rank quiet" }, String(k + 1)),
    element("td", {}, modelLink(row)),
    layers ? element("td", {}, named(row.site_b ?? "")) : null,
    element("td", { class: "value", title: row.exact ? null : "estimated from short vectors" }, [
      element("span", { class: "figure" }, `${row.exact || found.kind !== "cka" ? "" : "≈ "}${written(row.value)}`), bar(row.value),
    ]),
    layers ? null : element("td", { class: "wide-only" }, visible(row.architecture)),
    layers ? null : element("td", { class: "wide-only" }, chips(row.tags)),
    compare ? element("td", { class: "action" }, link(compare(row), "compare")) : null,
  ]));
  const classes: Record<string, string> = { architecture: "wide-only", tags: "wide-only" };
  return element("div", { class: "scroll" }, element("table", { class: "nearest" }, [
    element("thead", {}, element("tr", {}, head.filter((text) => text !== null).map((text) =>
      element("th", { class: classes[text] ?? null }, text)))),
    element("tbody", {}, rows),
  ]));
}
