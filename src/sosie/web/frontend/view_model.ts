// One model: what is known of it, what it is near, where it lies.

import { ask, numberOf, type Details, type Kind, type Named, type Nearest, type Points } from "./api.js";
import { card, chips, choose, type Children, counted, element, link, modelLink, named, parameters, visible, written } from "./dom.js";
import { familyCard } from "./family.js";
import { grouped } from "./groups.js";
import { modelMap } from "./map.js";
import { nearestTable } from "./nearest.js";
import { picker } from "./picker.js";
import type { Shown, Visit } from "./visit.js";

const NEAR = 10;

export async function modelView(visit: Visit): Promise<Shown> {
  const { zoo, parts, query, signal, go } = visit;
  const id = await numberOf(parts.join("/"), signal);
  const model = await ask<Details>(`models/${id}`, {}, { signal });
  const kinds = Object.keys(model.kinds) as Kind[];
  const kind = kinds.find((one) => one === query.get("kind")) ?? kinds[0];
  const near = await ask<Nearest>(`models/${id}/near`, { k: NEAR, kind }, { signal });
  const tabs = kinds.length > 1 ? element("div", { class: "tabs" }, kinds.map((one) =>
    link(`#/model/${id}?kind=${one}`, zoo.what[one], one === kind ? "tab current" : "tab"))) : null;
  return {
    title: visible(model.name),
    content: [
      element("header", { class: "lead-in" }, [
        element("p", { class: "kicker" }, [link("#/models", "Models"), " · ", visible(model.architecture)]),
        element("h1", { dir: "auto" }, named(model.name, "title")),
        element("p", { class: "lead" }, sentence(near)),
        chips(model.tags),
      ]),
      tabs,
      element("div", { class: "columns" }, [
        element("div", { class: "stack" }, [
          card("Nearest models", [
            nearestTable(near, (row) => pairOf(id, row.id, kind)),
            element("div", { class: "other" }, [element("span", { class: "quiet" }, "Compare with another"), picker("name of a model", (other) => go(pairOf(id, other.id, "cka")))]),
          ]),
          familyCard(zoo, id, signal),
          layers(visit, model, kind),
        ]),
        element("div", { class: "stack" }, [card("On the map", await small(visit, id, near), "small-map"), card("What is known", facts(model))]),
      ]),
    ].filter((node) => node !== null),
  };
}

function pairOf(a: number, b: number, kind: Kind): string {
  return `#/pair/${a}/${b}${kind === "cka" ? "" : `?kind=${kind}`}`;
}

function sentence(near: Nearest): Children {
  const first = near.rows[0];
  if (!first) return "There is nothing to compare it with.";
  return ["Nearest to it is ", modelLink(first), `: ${near.what} ${written(first.value)} on average, each layer with the one that fits it best.`];
}

async function small({ signal, go }: Visit, id: number, near: Nearest): Promise<Children> {
  let found: Points;
  try {
    found = await ask<Points>("map", { kind: near.kind }, { signal });
  } catch (error) {
    if ((error as Error).name === "AbortError") throw error;
    return element("p", { class: "quiet" }, visible((error as Error).message));
  }
  const marked = new Set([id, ...near.rows.slice(0, 5).map((row) => row.id)]);
  return [
    modelMap(found.points, grouped(found.points, "architecture"), {
      height: () => 260, lines: true, marked, centre: id, open: (point) => go(`#/model/${point.id}`),
    }).host,
    element("p", { class: "quiet note" }, "It, and the five nearest."),
  ];
}

function facts(model: Details): HTMLElement {
  const family = (some: Named[]) => element("span", { class: "listed" }, some.slice(0, 20).flatMap((one, k) => [k ? ", " : "", modelLink(one)]));
  const parent = model.parent === null ? null : model.parents.length ? family(model.parents) : [named(model.parent), " (not in the zoo)"];
  const rows: [string, Children][] = [
    ["parameters", parameters(model.parameters)], ["task", model.task === null ? null : visible(model.task)],
    ["fine-tuned from", parent], ["fine-tuned into", model.children.length ? family(model.children) : null],
    ["same weights", model.same_weights.length ? family(model.same_weights) : null],
    ["source", model.source === null ? null : named(model.source)], ["added", model.added.slice(0, 16).replace("T", " ")],
    ["weights", element("span", { class: "name" }, model.digest)],
    ["layers", Object.entries(model.kinds).map(([kind, sites]) => `${sites!.length} (${kind})`).join(", ")],
    ...Object.entries(model.absent).map(([kind, why]): [string, Children] => [`no ${kind}`, visible(why)]),
    ...model.notes.map((note): [string, Children] => ["note", visible(note)]),
  ];
  return element("dl", { class: "facts" }, rows.filter(([, value]) => value !== null).flatMap(([name, value]) =>
    [element("dt", {}, name), element("dd", {}, value)]));
}

// Layers of other models, nearest to one of this one's.
function layers({ signal }: Visit, model: Details, kind: Kind): HTMLElement {
  const sites = model.kinds[kind] ?? [];
  const place = element("div", { class: "answer", "aria-live": "polite" });
  const show = async (site: string) => {
    try {
      const found = await ask<Nearest>(`models/${model.id}/near`, { by: "layer", site, k: NEAR, kind }, { signal });
      place.replaceChildren(nearestTable(found, (row) => pairOf(model.id, row.id, kind)));
    } catch (error) {
      if ((error as Error).name !== "AbortError") place.replaceChildren(element("p", { class: "wrong" }, (error as Error).message));
    }
  };
  const first = sites[Math.floor(sites.length / 2)];
  void show(first);
  return card("Nearest layers", [
    element("div", { class: "tools" }, [choose("Of its layer", sites.map((site): [string, string] => [site, visible(site)]), first, show),
      element("span", { class: "quiet" }, counted(sites.length, "layer"))]),
    place,
  ]);
}
