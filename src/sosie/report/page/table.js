// The numbers: a row for each layer of A, sortable by any column.

function table(found) {
  const { measure, a, b } = found;
  const best = (i) => measure.best[i] ?? null;
  const partner = (i) => (best(i) === null ? "none" : named(b.sites[best(i)]));
  const depth = (i) => found.at("value", i, measure.partner[i]);
  const value = (i) => found.at("value", i, best(i));
  const low = (i) => found.at("low", i, best(i));
  const chance = (i) => found.at("null", i, best(i));
  const p = (i, kind) => found.at(kind, i, best(i));
  const shownP = (i, kind) => (p(i, kind) === null ? "" : writtenP(p(i, kind), measure.pFloor));
  const score = (i) => found.at("score", i, best(i));
  const unclear = (i, j) => j !== null && isByChance(found, i, j);
  const sign = (text, i, j) => (unclear(i, j)
    ? element("span", { class: "unclear", title: NOT_CLEAR }, [text, element("small", {}, " n.s.")]) : text);
  const between = (i) => (best(i) === null ? "" : rangeAt(found, i, best(i), 3));
  const notes = (i) => found.numbers(i, best(i)).filter((k) => !measure.caveats[k].all);
  const columns = [
    { title: found.pair.shifted ? "Inputs of A" : "Layer of A", key: (i) => i, cell: (i) => named(a.sites[i]) },
    { title: found.pair.inOrder ? "Layer of B" : found.pair.shifted ? "Closest inputs of B" : "Best match in B", key: best, cell: partner },
    { title: "Value", key: value, cell: (i) => sign(written(value(i), 3), i, best(i)), number: true },
    { title: "95 % interval", key: low, cell: between, number: true, hidden: !found.hasRange },
    {
      title: "Chance", key: chance, cell: (i) => (best(i) === null ? "" : chanceAt(found, i, best(i), 3)),
      number: true, hidden: !measure.null,
    },
    { title: "p", key: (i) => p(i, "p"), cell: (i) => shownP(i, "p"), number: true, hidden: !measure.p },
    {
      title: "p, corrected", key: (i) => p(i, "p_search"), cell: (i) => shownP(i, "p_search"),
      number: true, hidden: !measure.p_search,
    },
    { title: "Score", key: score, cell: (i) => written(score(i), 3), number: true, hidden: !measure.calibrated },
    {
      title: found.pair.shifted ? "Same shift" : "Same depth", key: depth, number: true, hidden: found.pair.inOrder,
      cell: (i) => sign(written(depth(i), 3), i, measure.partner[i]),
    },
    {
      title: "Caveats", key: (i) => notes(i).length, cell: (i) => noteNumbers(measure, notes(i)),
      hidden: measure.caveats.every(({ all }) => all),
    },
  ];
  const note = `n.s.: ${NOT_CLEAR} (p > ${DATA.level}). ` +
    (measure.p_search ? "p, corrected: for the search over all pairs." : "p is not corrected for the search.");
  return element("div", {}, [
    sortable(columns.filter(({ hidden }) => !hidden), a.sites.map((_, i) => i)),
    measure.correction ? element("p", { class: "quiet table-note" }, note) : null,
  ]);
}

// The numbers of the list of caveats below, with their words on hover.
function noteNumbers(measure, numbers) {
  const words = numbers.map((k) => measure.caveats[k].text).join("\n");
  return element("span", { title: words }, numbers.map((k) => k + 1).join(", "));
}

function sortable(columns, rows, label = "Best matches by layer") {
  const body = element("tbody");
  const heads = columns.map(({ title, number, about }) => element("th", { scope: "col", class: number ? "number" : null }, [
    element("button", { type: "button" }, title), about ? element("span", { class: "quiet about-column" }, about) : null,
  ]));
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
  const area = { class: "scroll layers-scroll", tabindex: 0, role: "region", "aria-label": label };
  return hinted(element("div", area,
    element("table", { class: "layers" }, [element("thead", {}, element("tr", {}, heads)), body])));
}

// Undefined values stay at the end whichever way the column is sorted.
function sorted(rows, key, down) {
  return [...rows].sort((one, other) => {
    const [x, y] = [key(one), key(other)];
    if (x === null || y === null) return (x === null) - (y === null);
    return down ? y - x : x - y;
  });
}
