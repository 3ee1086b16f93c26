// The same in numbers: a row for each layer of A, sortable by any column.

function table(found) {
  const { measure, a, b } = found;
  const rows = a.sites.map((site, i) => {
    const j = measure.best[i] ?? null;
    return {
      i, site, match: j === null ? null : b.sites[j], value: found.at("value", i, j), between: j === null ? "" : rangeAt(found, i, j, 3),
      depth: found.at("value", i, measure.partner[i]),
      notes: found.numbers(i, j).filter((k) => !measure.caveats[k].all),
    };
  });
  const columns = [
    { title: "Layer of A", key: (row) => row.i, cell: (row) => named(row.site) },
    { title: "Best match in B", key: (row) => measure.best[row.i], cell: (row) => (row.match === null ? "none" : named(row.match)) },
    { title: "Value", key: (row) => row.value, cell: (row) => written(row.value, 3), number: true },
    found.hasRange ? { title: "Interval", key: (row) => found.at("low", row.i, measure.best[row.i]), cell: (row) => row.between, number: true } : null,
    { title: "Same depth", key: (row) => row.depth, cell: (row) => written(row.depth, 3), number: true },
    measure.caveats.some(({ all }) => !all) ? { title: "Caveats", key: (row) => row.notes.length, cell: noteLinks(found) } : null,
  ].filter(Boolean);
  return sortable(columns, rows);
}

function noteLinks(found) {
  return (row) => element("span", { title: row.notes.map((k) => found.measure.caveats[k].text).join("\n") },
    row.notes.map((k) => k + 1).join(", "));
}

function sortable(columns, rows) {
  const body = element("tbody");
  const heads = columns.map(({ title, number }) =>
    element("th", { scope: "col", class: number ? "number" : null }, element("button", { type: "button" }, title)));
  const fill = (order) => body.replaceChildren(...order.map((row) =>
    element("tr", {}, columns.map(({ cell, number }) => element("td", { class: number ? "number" : null }, cell(row))))));
  heads.forEach((head, k) => head.firstChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    fill(sorted(rows, columns[k].key, down));
  }));
  heads[0].setAttribute("aria-sort", "ascending");
  fill(rows);
  return element("div", { class: "scroll layers-scroll", tabindex: 0, role: "region", "aria-label": "Best matches by layer" },
    element("table", { class: "layers" }, [element("thead", {}, element("tr", {}, heads)), body]));
}

// Undefined values stay at the end whichever way the column is sorted.
function sorted(rows, key, down) {
  return [...rows].sort((one, other) => {
    const [x, y] = [key(one), key(other)];
    if (x === null || y === null) return (x === null) - (y === null);
    return down ? y - x : x - y;
  });
}
