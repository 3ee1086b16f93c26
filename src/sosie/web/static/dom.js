// Text from the zoo enters the page as text nodes and attributes, never as markup.
import { element } from "./shared.js";
export { clamp, element, redrawn, shape } from "./shared.js";
// Controls, direction marks and the like are spelt out: a name must not act on the text around it.
export function visible(text) {
    const spelt = text.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (c) => `<U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}>`);
    return spelt.trim() ? spelt : "(no name)";
}
// A name in a sentence or a cell: its writing direction stays its own affair.
export function named(text, className = "name") {
    return element("bdi", { class: className }, visible(text));
}
export function link(href, children, className = null) {
    return element("a", { href, class: className }, children);
}
export function modelLink(model) {
    return link(`#/model/${model.id}`, named(model.name));
}
export function chips(tags) {
    return element("span", { class: "chips" }, tags.map((tag) => link(`#/models?${new URLSearchParams({ tag })}`, visible(tag), "chip")));
}
export function card(title, children, className = "") {
    return element("section", { class: `card ${className}`.trim() }, [title === null ? null : element("h2", {}, title), ...[children].flat()]);
}
export function announce(text) {
    document.getElementById("announcer").textContent = text;
}
// A number as a person would write it.
export function written(value, digits = 3) {
    if (value === null || value === undefined)
        return "undefined";
    const size = Math.abs(value);
    if (size !== 0 && (size < 0.5 * 10 ** -digits || size >= 1e6))
        return value.toExponential(2);
    return size >= 100 ? String(Number(value.toPrecision(digits + 2))) : value.toFixed(digits);
}
export function counted(count, what) {
    return `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;
}
export function parameters(count) {
    for (const [size, unit] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]]) {
        if (count >= size)
            return `${Number((count / size).toPrecision(3))}${unit}`;
    }
    return String(count);
}
export function choose(label, options, value, change) {
    const select = element("select", { change: () => change(select.value) }, options.map(([key, text]) => element("option", { value: key, selected: key === value }, text)));
    return element("label", { class: "choice" }, [element("span", { class: "quiet" }, label), select]);
}
