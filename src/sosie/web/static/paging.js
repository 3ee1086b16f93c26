// Long lists a page at a time, and what they are filtered by.
import { choose, element, visible } from "./dom.js";
export function pages(page, size, turn) {
    const last = page.offset + page.rows.length;
    if (page.offset === 0 && last >= page.total && page.total <= 10)
        return element("nav", { class: "pages", "aria-label": "Pages" });
    return element("nav", { class: "pages", "aria-label": "Pages" }, [
        page.offset > 0 ? turn(Math.max(page.offset - size, 0), "← before") : null,
        page.rows.length ? element("span", { class: "quiet" }, `${page.offset + 1} to ${last} of ${page.total.toLocaleString("en")}`) : null,
        last < page.total ? turn(last, "after →") : null,
    ]);
}
// A table that turns its pages in place; what came first is there already.
export function paged(first, size, load, table) {
    const host = element("div", { class: "answer", "aria-live": "polite" });
    const show = (page) => host.replaceChildren(table(page), pages(page, size, (offset, text) => element("button", { type: "button", class: "small", click: () => void turn(offset) }, text)));
    const turn = async (offset) => {
        try {
            show(await load(offset));
        }
        catch (error) {
            if (error.name !== "AbortError")
                host.replaceChildren(element("p", { class: "wrong" }, visible(error.message)));
        }
    };
    show(first);
    return host;
}
export function filters(zoo, asked, pick) {
    const some = [
        ["Architecture", "architecture", zoo.choices.architectures], ["Task", "task", zoo.choices.tasks], ["Tag", "tag", zoo.choices.tags],
    ];
    return some.map(([label, name, choices]) => (choices.length < 2 && !asked[name] ? null : choose(label, [["", "any"], ...choices.map((one) => [one.name, `${visible(one.name)} (${one.count})`])], asked[name], (value) => pick(name, value))));
}
