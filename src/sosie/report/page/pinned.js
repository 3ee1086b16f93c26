// The pair of layers that was clicked, with its numbers as text that can be copied and is printed.

function pinned(found) {
  const host = element("div", { class: "pinned" });
  const fill = () => {
    const [i, j] = state.cell ?? [];
    const there = i < found.a.sites.length && j < found.b.sites.length;
    host.replaceChildren(...(there ? pinnedFacts(found, i, j) : [
      element("p", { class: "quiet hint" }, "Click a cell, or press Enter on it, to keep its numbers here."),
    ]));
  };
  fill();
  return { host, choose: (i, j) => {
    state.cell = [i, j];
    fill();
  } };
}

function pinnedFacts(found, i, j) {
  const between = rangeAt(found, i, j);
  const facts = [
    ["Value", written(found.at("value", i, j))],
    ...(between ? [["95 % interval", between]] : []),
    ...chanceFacts(found, i, j),
  ];
  return [
    element("h4", {}, [named(found.a.sites[i]), " and ", named(found.b.sites[j])]),
    element("dl", { class: "numbers-list" }, facts.map(([term, text]) =>
      element("div", {}, [element("dt", {}, term), element("dd", {}, text)]))),
    isByChance(found, i, j) ? element("p", { class: "verdict" }, `This value is ${NOT_CLEAR}.`) : null,
    tipNotes(found.notes(i, j)),
  ].filter(Boolean);
}
