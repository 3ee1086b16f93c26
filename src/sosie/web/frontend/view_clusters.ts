// Which models belong together: groups on the map, and who is in them.

import { ask, type ClusterGroup, type Clusters, type Kind, type Members, type Points } from "./api.js";
import { announce, card, chips, choose, clamp, counted, element, modelLink, visible, written } from "./dom.js";
import { clustered, type Grouping } from "./groups.js";
import { modelMap } from "./map.js";
import { bar } from "./nearest.js";
import { filters, paged } from "./paging.js";
import type { Shown, Visit } from "./visit.js";

const ROWS = 25;
const MOST = 20; // groups to choose from

export async function clustersView({ zoo, query, signal, go }: Visit): Promise<Shown> {
  const names = ["k", "architecture", "task", "tag"];
  const asked: Record<string, string> = Object.fromEntries(names.map((name) => [name, query.get(name) ?? ""]));
  const kind = (query.get("kind") ?? zoo.kinds[0]) as Kind;
  const to = (changes: Record<string, string>) => {
    const all = { ...asked, kind: kind === zoo.kinds[0] ? "" : kind, ...changes };
    const next = new URLSearchParams(Object.entries(all).filter(([, value]) => value !== ""));
    return `#/clusters${next.size ? `?${next}` : ""}`;
  };
  const only = filters(zoo, asked, (name, value) => go(to({ [name]: value, k: "" })));
  const head = (text: string) => element("header", { class: "lead-in" }, [element("h1", {}, "Clusters"), element("p", { class: "lead" }, text)]);
  const tools = (found: Clusters | null) => element("div", { class: "tools" }, [
    choose("Groups", numbers(zoo.models, found, asked.k), asked.k, (k) => go(to({ k }))),
    zoo.kinds.length > 1 ? choose("Measure", zoo.kinds.map((one) => [one, zoo.what[one]]), kind, (one) => go(to({ kind: one }))) : null,
    only.some((one) => one !== null) ? element("details", { class: "some", open: names.slice(1).some((name) => asked[name] !== "") }, [
      element("summary", { class: "quiet" }, "Of some models only"), element("div", { class: "tools" }, only),
    ]) : null,
  ]);
  let found: Clusters;
  try {
    found = await ask<Clusters>("clusters", { ...asked, kind }, { signal });
  } catch (error) {
    if ((error as Error).name === "AbortError") throw error;
    return { title: "Clusters", content: [head("Which models belong together?"), card(null, [tools(null), element("p", { class: "wrong" }, visible((error as Error).message))])] };
  }
  const points = await ask<Points>("map", { kind }, { signal });
  const grouping = clustered(points.points, found);
  const drawn = modelMap(points.points, grouping, {
    height: (width) => clamp(Math.min(width * 0.8, window.innerHeight * 0.6), 280, 640), lines: false, open: (point) => go(`#/model/${point.id}`),
  });
  const place = element("div", { "aria-live": "polite" });
  const list = element("tbody");
  const pick = async (group: ClusterGroup | null) => {
    drawn.mark(group && new Set(found.ids.filter((_, k) => found.clusters[k] === group.cluster)));
    list.replaceChildren(...found.groups.map((one) => row(one, grouping, one === group, to({ cluster: String(one.cluster) }), () => {
      const next = one === group ? null : one;
      history.replaceState(null, "", to(next ? { cluster: String(next.cluster) } : {}));
      void pick(next);
    })));
    if (!group) return place.replaceChildren();
    const load = (offset: number) => ask<Members>(`clusters/${group.cluster}`, { ...asked, kind, offset, limit: ROWS }, { signal });
    try {
      const first = await load(0);
      place.replaceChildren(card(`Around ${visible(group.centre.name)}`, paged(first, ROWS, load, (page) => members(page, found.what))));
      announce(`${counted(first.total, "model")} around ${visible(group.centre.name)}`);
    } catch (error) {
      if ((error as Error).name !== "AbortError") place.replaceChildren(element("p", { class: "wrong" }, visible((error as Error).message)));
    }
  };
  await pick(found.groups.find((group) => String(group.cluster) === query.get("cluster")) ?? null);
  return {
    title: "Clusters",
    content: [
      head(sentence(found)),
      element("div", { class: "columns" }, [
        card(null, [tools(found), drawn.host, element("p", { class: "quiet note" }, "Colours are those of the groups. Click a point to open the model.")], "map-card"),
        card("Groups", [
          element("div", { class: "scroll" }, element("table", { class: "clusters" }, [
            element("thead", {}, element("tr", {}, ["around", "models", "similarity"].map((text, k) => element("th", { class: k ? "number" : null }, text)))), list,
          ])),
          element("p", { class: "quiet note" }, "Each is called by the model most like the others in it; similarity is the mean of a model with the others of its group, from the short vectors. Click one to see who is in it."),
        ]),
      ]),
      place,
    ],
  };
}

function sentence(found: Clusters): string {
  const apart = found.silhouette === null ? "" : found.silhouette > 0.5 ? " They lie well apart" : found.silhouette > 0.25 ? " They lie apart" : " They hardly lie apart";
  const how = found.silhouette === null ? "" : `${apart} (mean silhouette ${written(found.silhouette, 2)})${found.chosen ? ", more so than with any other number of groups up to 20" : ""}.`;
  return `${counted(found.total, "model")} in ${counted(found.groups.length, "group")}, alike by ${found.what}.${how}`;
}

function numbers(models: number, found: Clusters | null, asked: string): [string, string][] {
  const fits = found?.chosen ? `as fits best (${found.groups.length})` : "as fits best";
  const some = Array.from({ length: Math.max(Math.min(MOST, models) - 1, 0) }, (_, k) => String(k + 2));
  return [["", fits], ...[...some, ...(asked === "" || some.includes(asked) ? [] : [asked])].map((k): [string, string] => [k, k])];
}

function row(group: ClusterGroup, grouping: Grouping, current: boolean, href: string, pick: () => void): HTMLElement {
  const place = grouping.groups.find((one) => one.name === group.centre.name);
  const colour = place?.colour ?? null;
  const mostly = group.architecture.count === group.count ? "all" : `${group.architecture.count} of them`;
  const opened = element("a", {
    href, class: "picked-group", "aria-current": current ? "true" : null,
    click: (event: MouseEvent) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      pick();
    },
  }, [element("span", { class: colour === null ? "swatch grey" : `swatch group-${colour}` }), element("bdi", { class: "name" }, visible(group.centre.name))]);
  return element("tr", { class: current ? "current-row" : null }, [
    element("td", {}, [opened, element("div", { class: "quiet under" }, `${mostly} ${visible(group.architecture.name)}`)]),
    element("td", { class: "number" }, group.count.toLocaleString("en")),
    element("td", { class: "number" }, group.similarity === null ? "–" : written(group.similarity)),
  ]);
}

function members(page: Members, what: string): HTMLElement {
  const head: [string, string | null][] = [["model", null], [`${what}, mean`, null], ["architecture", "wide-only"], ["task", "wide-only"], ["tags", "wide-only"]];
  return element("div", { class: "scroll" }, element("table", { class: "members" }, [
    element("thead", {}, element("tr", {}, head.map(([text, name]) => element("th", { class: name }, text)))),
    element("tbody", {}, page.rows.map((one) => element("tr", {}, [
      element("td", {}, modelLink(one)),
      element("td", { class: "value" }, one.similarity === null ? "alone" : [element("span", { class: "figure" }, written(one.similarity)), bar(one.similarity)]),
      element("td", { class: "wide-only" }, visible(one.architecture)), element("td", { class: "wide-only" }, one.task === null ? "" : visible(one.task)),
      element("td", { class: "wide-only" }, chips(one.tags)),
    ]))),
  ]));
}
