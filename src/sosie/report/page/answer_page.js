// The page of an answer: the map, if it is one, and the rows.

const content = document.getElementById("content");

function coloured() {
  const host = element("div", {});
  const kinds = [["architecture", "architecture"], ["task", "task"], ["tag", "tags"]];
  const useful = kinds.filter(([by]) => groupsOf(DATA.points, by).size > 1);
  const draw = (by) => host.replaceChildren(...mapFigure(DATA.points, by));
  const choices = useful.map(([by, title], k) => {
    const input = element("input", { type: "radio", name: "colour", change: () => draw(by) });
    input.checked = k === 0;
    return element("label", { class: "choice" }, [input, title]);
  });
  draw(useful.length ? useful[0][0] : "architecture");
  if (choices.length < 2) return [host];
  return [element("p", { class: "colour-by quiet" }, "Colour by"),
    element("div", { class: "switch", role: "radiogroup", "aria-label": "Colour by" }, choices), host];
}

function cell(value, column) {
  if (typeof value === "number") return element("td", { class: "number" }, Number.isInteger(value) ? value.toLocaleString("en") : written(value));
  return element("td", { class: isNumber[column] ? "number" : null }, named(value ?? "", column < 1 ? "name" : "words"));
}

const isNumber = DATA.columns.map((_, k) => DATA.rows.some((row) => typeof row[k] === "number"));

function table() {
  const head = DATA.columns.map((column, k) => element("th", { scope: "col", class: isNumber[k] ? "number" : null }, column.replaceAll("_", " ")));
  const rows = DATA.rows.map((row) => element("tr", {}, row.map(cell)));
  return element("div", { class: "scroll" }, element("table", { class: "answer" }, [element("thead", {}, element("tr", {}, head)), element("tbody", {}, rows)]));
}

content.append(element("div", { class: "panel" }, [
  DATA.points.length ? element("section", { class: "card" }, [
    element("h3", {}, "Map"), ...coloured(),
    DATA.undrawn ? element("p", { class: "quiet" }, `${DATA.undrawn.toLocaleString("en")} more models are not drawn.`) : null,
  ]) : null,
  DATA.rows.length ? element("section", { class: "card" }, [
    element("h3", {}, "Rows"), table(),
    DATA.left ? element("p", { class: "quiet" }, `${DATA.left.toLocaleString("en")} more rows are not shown.`) : null,
  ]) : null,
]));
