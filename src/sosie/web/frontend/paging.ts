// Long lists a page at a time, and what they are filtered by.

import type { Choice, ZooInfo } from "./api.js";
import { choose, element, visible } from "./dom.js";

interface Paged { total: number; offset: number; rows: unknown[] }

export function pages(page: Paged, size: number, turn: (offset: number, text: string) => HTMLElement): HTMLElement {
  const last = page.offset + page.rows.length;
  if (page.offset === 0 && last >= page.total && page.total <= 10) return element("nav", { class: "pages", "aria-label": "Pages" });
  return element("nav", { class: "pages", "aria-label": "Pages" }, [
    page.offset > 0 ? turn(Math.max(page.offset - size, 0), "← before") : null,
    page.rows.length ? element("span", { class: "quiet" }, `${page.offset + 1} to ${last} of ${page.total.toLocaleString("en")}`) : null,
    last < page.total ? turn(last, "after →") : null,
  ]);
}

// A table that turns its pages in place; what came first is there already.
export function paged<P extends Paged>(first: P, size: number, load: (offset: number) => Promise<P>, table: (page: P) => HTMLElement): HTMLElement {
  const host = element("div", { class: "answer", "aria-live": "polite" });
  const show = (page: P) => host.replaceChildren(table(page), pages(page, size, (offset, text) =>
    element("button", { type: "button", class: "small", click: () => void turn(offset) }, text)));
  const turn = async (offset: number) => {
    try {
      show(await load(offset));
    } catch (error) {
      if ((error as Error).name !== "AbortError") host.replaceChildren(element("p", { class: "wrong" }, visible((error as Error).message)));
    }
  };
  show(first);
  return host;
}

export function filters(zoo: ZooInfo, asked: Record<string, string>, pick: (name: string, value: string) => void): (HTMLElement | null)[] {
  const some: [label: string, name: string, choices: Choice[]][] = [
    ["Architecture", "architecture", zoo.choices.architectures], ["Task", "task", zoo.choices.tasks], ["Tag", "tag", zoo.choices.tags],
  ];
  return some.map(([label, name, choices]) => (choices.length < 2 && !asked[name] ? null : choose(
    label, [["", "any"], ...choices.map((one): [string, string] => [one.name, `${visible(one.name)} (${one.count})`])],
    asked[name], (value) => pick(name, value),
  )));
}
