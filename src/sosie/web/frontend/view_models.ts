// All models in a table, a page at a time.

import { ask, type Listed, type Page } from "./api.js";
import { card, chips, counted, element, link, modelLink, named, parameters, visible } from "./dom.js";
import { filters, pages } from "./paging.js";
import type { Shown, Visit } from "./visit.js";

const ROWS = 50;

export async function modelsView({ zoo, query, signal, go }: Visit): Promise<Shown> {
  const offset = Math.max(Number.parseInt(query.get("offset") ?? "0", 10) || 0, 0);
  const asked = Object.fromEntries(["text", "tag", "architecture", "task"].map((name) => [name, query.get(name) ?? ""]));
  const page = await ask<Page>("models", { ...asked, offset, limit: ROWS }, { signal });
  const to = (changes: Record<string, string>) => {
    const next = new URLSearchParams(Object.entries({ ...asked, ...changes }).filter(([, value]) => value !== ""));
    return `#/models${next.size ? `?${next}` : ""}`;
  };
  const text = element("input", {
    type: "search", value: asked.text, placeholder: "part of a name", "aria-label": "Part of a name", maxlength: 200,
    change: () => go(to({ text: text.value.trim() })),
  });
  const filtered = Object.values(asked).some((value) => value !== "");
  return {
    title: "Models",
    content: [
      element("header", { class: "lead-in" }, [
        element("h1", {}, "Models"),
        element("p", { class: "lead" }, filtered ? `${page.total.toLocaleString("en")} of ${counted(zoo.models, "model")}.` : `${counted(zoo.models, "model")}.`),
      ]),
      card(null, [
        element("div", { class: "tools" }, [
          element("label", { class: "choice" }, [element("span", { class: "quiet" }, "Name"), text]),
          ...filters(zoo, asked, (name, value) => go(to({ [name]: value }))), filtered ? link("#/models", "show all", "reset") : null,
        ]),
        page.rows.length ? table(page.rows) : element("p", { class: "quiet" }, filtered ? "No model matches." : "There are no models yet."),
        pages(page, ROWS, (start, text) => link(to(start ? { offset: String(start) } : {}), text)),
      ]),
      element("p", { class: "quiet" }, [
        "Which of them for your data? That takes the data and runs the models, which the explorer does not do: ",
        element("code", {}, `sosie zoo recommend ${visible(zoo.name)} --data npz:mine.npz`), ".",
      ]),
      zoo.failed ? element("p", { class: "quiet" }, `${counted(zoo.failed, "model")} could not be added: \`sosie zoo list --failed\` says why.`) : element("span"),
    ],
  };
}

function table(rows: Listed[]): HTMLElement {
  const head: [string, string | null][] = [["name", null], ["architecture", null], ["parameters", "number"], ["task", "wide-only"],
    ["tags", "wide-only"], ["from", "wide-only"], ["added", "wide-only"]];
  return element("div", { class: "scroll" }, element("table", { class: "models" }, [
    element("thead", {}, element("tr", {}, head.map(([text, kind]) => element("th", { class: kind }, text)))),
    element("tbody", {}, rows.map((row) => element("tr", {}, [
      element("td", {}, modelLink(row)), element("td", {}, visible(row.architecture)),
      element("td", { class: "number" }, parameters(row.parameters)), element("td", { class: "wide-only" }, row.task === null ? "" : visible(row.task)),
      element("td", { class: "wide-only" }, chips(row.tags)), element("td", { class: "wide-only" }, row.parent === null ? "" : named(row.parent)),
      element("td", { class: "wide-only quiet date" }, row.added.slice(0, 10)),
    ]))),
  ]));
}
