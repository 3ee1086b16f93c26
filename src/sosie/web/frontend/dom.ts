// Text from the zoo enters the page as text nodes and attributes, never as markup.

import { type Children, element } from "./shared.js";

export { type Attributes, type Children, clamp, element, redrawn, shape } from "./shared.js";

// Controls, direction marks and the like are spelt out: a name must not act on the text around it.
export function visible(text: string): string {
  const spelt = text.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (c) =>
    `<U+${c.codePointAt(0)!.toString(16).toUpperCase().padStart(4, "0")}>`);
  return spelt.trim() ? spelt : "(no name)";
}

// A name in a sentence or a cell: its writing direction stays its own affair.
export function named(text: string, className = "name"): HTMLElement {
  return element("bdi", { class: className }, visible(text));
}

export function link(href: string, children: Children, className: string | null = null): HTMLAnchorElement {
  return element("a", { href, class: className }, children);
}

export function modelLink(model: { id: number; name: string }): HTMLAnchorElement {
  return link(`#/model/${model.id}`, named(model.name));
}

export function chips(tags: string[]): HTMLElement {
  return element("span", { class: "chips" }, tags.map((tag) =>
    link(`#/models?${new URLSearchParams({ tag })}`, visible(tag), "chip")));
}

export function card(title: string | null, children: Children, className = ""): HTMLElement {
  return element("section", { class: `card ${className}`.trim() }, [title === null ? null : element("h2", {}, title), ...[children].flat()]);
}

export function announce(text: string): void {
  document.getElementById("announcer")!.textContent = text;
}

// A number as a person would write it.
export function written(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined) return "undefined";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.5 * 10 ** -digits || size >= 1e6)) return value.toExponential(2);
  return size >= 100 ? String(Number(value.toPrecision(digits + 2))) : value.toFixed(digits);
}

export function counted(count: number, what: string): string {
  return `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;
}

export function parameters(count: number): string {
  for (const [size, unit] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]] as const) {
    if (count >= size) return `${Number((count / size).toPrecision(3))}${unit}`;
  }
  return String(count);
}

export function choose(
  label: string, options: [value: string, text: string][], value: string, change: (value: string) => void,
): HTMLElement {
  const select = element("select", { change: () => change(select.value) },
    options.map(([key, text]) => element("option", { value: key, selected: key === value }, text)));
  return element("label", { class: "choice" }, [element("span", { class: "quiet" }, label), select]);
}
