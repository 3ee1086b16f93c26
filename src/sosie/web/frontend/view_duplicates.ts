// Which models are there twice: the same weights, or others that do the same at every layer.

import { ask, type Duplicates, type Kind } from "./api.js";
import { card, choose, counted, element, link, modelLink, visible, written } from "./dom.js";
import { paged } from "./paging.js";
import type { Shown, Visit } from "./visit.js";

const ROWS = 25;
const THRESHOLDS = ["0.99999", "0.999", "0.99", "0.95", "0.9"];
type Why = "weights" | "alike";

export async function duplicatesView({ zoo, query, signal, go }: Visit): Promise<Shown> {
  const kind = (query.get("kind") ?? zoo.kinds[0]) as Kind;
  const threshold = query.get("threshold") ?? THRESHOLDS[0];
  const to = (changes: Record<string, string>) => `#/duplicates?${new URLSearchParams({ kind, threshold, ...changes })}`;
  const load = (why: Why) => (offset: number) => ask<Duplicates>("duplicates", { kind, threshold, why, offset, limit: ROWS }, { signal });
  const steps = THRESHOLDS.includes(threshold) ? THRESHOLDS : [threshold, ...THRESHOLDS];
  const tools = element("div", { class: "tools" }, [
    choose("Alike from", steps.map((one): [string, string] => [one, one]), threshold, (one) => go(to({ threshold: one }))),
    zoo.kinds.length > 1 ? choose("Measure", zoo.kinds.map((one) => [one, zoo.what[one]]), kind, (one) => go(to({ kind: one }))) : null,
  ]);
  const head = (text: string) => element("header", { class: "lead-in" }, [element("h1", {}, "Duplicates"), element("p", { class: "lead" }, text)]);
  const title = "Duplicates";
  let [same, alike]: Duplicates[] = [];
  try {
    same = await load("weights")(0);
    alike = await load("alike")(0);
  } catch (error) {
    if ((error as Error).name === "AbortError") throw error;
    return { title, content: [head("Which models are there twice?"), card(null, [tools, element("p", { class: "wrong" }, visible((error as Error).message))])] };
  }
  const part = (found: Duplicates, why: Why, heading: string, about: string, none: string) => card(heading, found.total
    ? [element("p", { class: "quiet" }, about), paged(found, ROWS, load(why), table)]
    : element("p", { class: "quiet" }, none));
  return {
    title,
    content: [
      head(sentence(same)), tools,
      part(same, "weights", "The same weights", "Every weight is equal, under another name.", "No two models have the same weights."),
      part(alike, "alike", "Alike at every layer",
        `Other weights, but ${found(alike)} at every layer in order. CKA does not see rotations and scales: a network with its neurons in another order is one of these.`,
        `No other two models have ${found(alike)} at every layer.`),
    ],
  };
}

const found = (one: Duplicates) => `${one.what} of ${one.threshold} or more`;

function sentence(one: Duplicates): string {
  const count = one.same_weights + one.alike;
  if (!count) return `None of ${counted(one.models, "model")} is there twice.`;
  return `${count.toLocaleString("en")} of ${counted(one.models, "model")} ${count === 1 ? "is" : "are"} there already under another name: ${one.same_weights.toLocaleString("en")} with the same weights, ${one.alike.toLocaleString("en")} alike at every layer.`;
}

function table(page: Duplicates): HTMLElement {
  const head: [string, string | null][] = [["model", null], ["is there as", null], ["lowest of all layers", "number"], ["architecture", "wide-only"], ["", "action"]];
  return element("div", { class: "scroll" }, element("table", { class: "duplicates" }, [
    element("thead", {}, element("tr", {}, head.map(([text, name]) => element("th", { class: name }, text)))),
    element("tbody", {}, page.rows.map((one) => element("tr", {}, [
      element("td", {}, modelLink(one)), element("td", {}, modelLink({ id: one.same_id, name: one.same_as })),
      element("td", { class: "number", title: one.exact ? null : "estimated from short vectors" }, `${one.exact || page.kind !== "cka" ? "" : "≈ "}${written(one.value, 5)}`),
      element("td", { class: "wide-only" }, visible(one.architecture)),
      element("td", { class: "action" }, link(`#/pair/${one.same_id}/${one.id}${page.kind === "cka" ? "" : `?kind=${page.kind}`}`, "compare")),
    ]))),
  ]));
}
