// The page of an answer: the map, if it is one, and the rows.

function coloured() {
  const host = element("div", {});
  const kinds = [["architecture", "architecture"], ["task", "task"], ["tag", "tags"]];
  const useful = kinds.filter(([by]) => groupsOf(DATA.points, by).size > 1);
  const draw = (by) => host.replaceChildren(...mapFigure(DATA.points, by));
  draw(useful.length ? useful[0][0] : "architecture");
  if (useful.length < 2) return [host];
  return [element("p", { class: "colour-by quiet" }, "Colour by"), choices("colour", "Colour by", useful, useful[0][0], draw), host];
}

function cell(value, column) {
  if (typeof value === "number") return element("td", { class: "number" }, Number.isInteger(value) ? value.toLocaleString("en") : written(value));
  return element("td", { class: isNumber[column] ? "number" : null }, named(value ?? "", column < 1 ? "name" : "words"));
}

const isNumber = DATA.columns.map((_, k) => DATA.rows.some((row) => typeof row[k] === "number"));

function table() {
  const head = DATA.columns.map((column, k) => element("th", { scope: "col", class: isNumber[k] ? "number" : null }, column.replaceAll("_", " ")));
  const rows = DATA.rows.map((row) => element("tr", {}, row.map(cell)));
  const area = { class: "scroll", tabindex: 0, role: "region", "aria-label": "Rows" };
  return hinted(element("div", area, element("table", { class: "answer" }, [element("thead", {}, element("tr", {}, head)), element("tbody", {}, rows)])));
}

const left = (count, words) => (count ? element("p", { class: "quiet" }, `${count.toLocaleString("en")} more ${words}.`) : null);

content.append(element("div", { class: "panel" }, [
  DATA.points.length ? section("Map", ...coloured(), left(DATA.undrawn, "models are not drawn")) : null,
  DATA.rows.length ? section("Rows", table(), left(DATA.left, "rows are not shown"), DATA.points.length ? null : tools(downloads(["rows"], () => [DATA.columns, ...DATA.rows]))) : null,
]));
