// The same in numbers: a row for each layer of A, sortable by any column.

function table(found) {
  const { measure, a, b } = found;
  const best = (i) => measure.best[i] ?? null;
  const partner = (i) => (best(i) === null ? "none" : named(b.sites[best(i)]));
  const depth = (i) => found.at("value", i, measure.partner[i]);
  const value = (i) => found.at("value", i, best(i));
  const low = (i) => found.at("low", i, best(i));
  const between = (i) => (best(i) === null ? "" : rangeAt(found, i, best(i), 3));
  const notes = (i) => found.numbers(i, best(i)).filter((k) => !measure.caveats[k].all);
  const columns = [
    { title: "Layer of A", key: (i) => i, cell: (i) => named(a.sites[i]) },
    { title: "Best match in B", key: best, cell: partner },
    { title: "Value", key: value, cell: (i) => written(value(i), 3), number: true },
    { title: "Interval", key: low, cell: between, number: true, hidden: !found.hasRange },
    { title: "Same depth", key: depth, cell: (i) => written(depth(i), 3), number: true },
    {
      title: "Caveats", key: (i) => notes(i).length, cell: (i) => noteNumbers(measure, notes(i)),
      hidden: measure.caveats.every(({ all }) => all),
    },
  ];
  return sortable(columns.filter(({ hidden }) => !hidden), a.sites.map((_, i) => i));
}

// The numbers of the list of caveats below, with their words on hover.
function noteNumbers(measure, numbers) {
  const words = numbers.map((k) => measure.caveats[k].text).join("\n");
  return element("span", { title: words }, numbers.map((k) => k + 1).join(", "));
}

function sortable(columns, rows) {
  const body = element("tbody");
  const heads = columns.map(({ title, number }) =>
    element("th", { scope: "col", class: number ? "number" : null }, element("button", { type: "button" }, title)));
  const cells = (row) =>
    columns.map(({ cell, number }) => element("td", { class: number ? "number" : null }, cell(row)));
  const fill = (order) => body.replaceChildren(...order.map((row) => element("tr", {}, cells(row))));
  heads.forEach((head, k) => head.firstChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    fill(sorted(rows, columns[k].key, down));
  }));
  heads[0].setAttribute("aria-sort", "ascending");
  fill(rows);
  const area = { class: "scroll layers-scroll", tabindex: 0, role: "region", "aria-label": "Best matches by layer" };
  return element("div", area,
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
