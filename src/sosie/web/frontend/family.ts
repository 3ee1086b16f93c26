// Where a model comes from: those most like it at layers of the same name, and what was recorded.

import { ask, type Family, type Relative, type ZooInfo } from "./api.js";
import { card, type Children, element, link, modelLink, named, visible, written } from "./dom.js";

const MOST = 5;
const KINDS = ["cka", "weights", "atoms"] as const;

export function familyCard(zoo: ZooInfo, id: number, signal: AbortSignal): HTMLElement {
  const place = element("div", { class: "family-found", "aria-live": "polite" }, element("p", { class: "quiet" }, "looking …"));
  const show = async () => {
    try {
      const found = await ask<Family>(`models/${id}/family`, { k: MOST }, { signal });
      place.replaceChildren(element("p", {}, sentence(found)), ...(found.rows.length ? [table(zoo, id, found), note(found)] : []));
    } catch (error) {
      if ((error as Error).name !== "AbortError") place.replaceChildren(element("p", { class: "wrong" }, visible((error as Error).message)));
    }
  };
  void show();
  return card("Where it comes from", place);
}

function sentence(found: Family): Children {
  const best = found.rows[0];
  const parent = found.rows.find((row) => row.recorded === "parent");
  const known = found.parent === null ? ["No parent was recorded."] : found.parent.id === null
    ? ["Recorded as its parent: ", named(found.parent.name), ", which is not in the zoo."]
    : ["Recorded as its parent: ", modelLink({ id: found.parent.id, name: found.parent.name }), parent ? ` (${written(parent.score)}).` : ", which has no layers of the same names."];
  if (!best) return ["No other model has layers of the same names. ", ...known];
  if (best === parent) return ["Most like it layer by layer is ", modelLink(best), ` (${written(best.score)}), which was recorded as its parent.`];
  return ["Most like it layer by layer is ", modelLink(best), ` (${written(best.score)}). `, ...known];
}

function table(zoo: ZooInfo, id: number, found: Family): HTMLElement {
  const kinds = KINDS.filter((kind) => found.rows.some((row) => row[kind] !== null));
  const several = kinds.length > 1;
  const recorded = found.rows.some((row) => row.recorded !== null);
  const head: [string, string | null][] = [["model", null], ...(recorded ? [["recorded", null] as [string, null]] : []), ["score", "number"],
    ["above the median", "number wide-only"], ...(several ? kinds.map((kind): [string, string] => [zoo.what[kind], "number wide-only"]) : []), ["", "action"]];
  const line = (row: Relative) => element("tr", {}, [
    element("td", {}, modelLink(row)), recorded ? element("td", {}, row.recorded ?? "") : null,
    element("td", { class: "number" }, written(row.score)),
    element("td", { class: "number wide-only" }, row.above === null ? "" : `${row.above < 0 ? "−" : "+"}${written(Math.abs(row.above))}`),
    ...(several ? kinds.map((kind) => element("td", { class: "number wide-only" }, row[kind] === null ? "" : written(row[kind]))) : []),
    element("td", { class: "action" }, link(`#/pair/${id}/${row.id}`, "compare")),
  ]);
  return element("div", { class: "scroll" }, element("table", { class: "family" }, [
    element("thead", {}, element("tr", {}, head.map(([text, name]) => element("th", { class: name }, text)))), element("tbody", {}, found.rows.map(line)),
  ]));
}

function note(found: Family): HTMLElement {
  const more = found.total > found.rows.length ? ` ${found.rows.length} of ${found.total} are shown.` : "";
  return element("p", { class: "quiet note" }, `Score: the mean similarity at layers of the same name, over the kinds of vectors that both have; of ${found.candidates.toLocaleString("en")} looked at. It does not say which of two came first.${more}`);
}
