// A box that finds models by a part of their names.
import { ask } from "./api.js";
import { element, named, visible } from "./dom.js";
const MOST = 8;
const PAUSE = 120; // ms without a key before the server is asked
let made = 0;
export function picker(label, pick) {
    made += 1;
    const id = `found-${made}`;
    const list = element("ul", { class: "found", role: "listbox", id, "aria-label": "Models", hidden: true });
    const box = element("input", {
        type: "search", role: "combobox", placeholder: label, "aria-label": label, autocomplete: "off", spellcheck: "false",
        maxlength: 200, "aria-expanded": "false", "aria-controls": id, "aria-autocomplete": "list",
    });
    let [rows, active, asked, timer] = [[], -1, null, 0];
    const open = (shown) => {
        list.hidden = !shown;
        box.setAttribute("aria-expanded", String(shown));
        if (!shown)
            box.removeAttribute("aria-activedescendant");
    };
    const choose = (model) => {
        open(false);
        box.value = "";
        pick(model);
    };
    const mark = (k) => {
        active = k;
        [...list.children].forEach((item, i) => item.setAttribute("aria-selected", String(i === k)));
        if (k >= 0 && rows.length)
            box.setAttribute("aria-activedescendant", `${id}-${k}`);
    };
    const show = (page) => {
        rows = page.rows;
        const items = rows.map((model, k) => element("li", {
            role: "option", id: `${id}-${k}`, "aria-selected": "false", pointerdown: (event) => event.preventDefault(), click: () => choose(model),
        }, [named(model.name), element("span", { class: "quiet" }, visible(model.architecture))]));
        const more = page.total - rows.length;
        if (!rows.length)
            items.push(element("li", { class: "quiet none", role: "presentation" }, "no model of that name"));
        else if (more > 0)
            items.push(element("li", { class: "quiet none", role: "presentation" }, `and ${more.toLocaleString("en")} more`));
        list.replaceChildren(...items);
        open(true);
        mark(rows.length ? 0 : -1);
    };
    const look = async () => {
        asked?.abort();
        asked = new AbortController();
        try {
            show(await ask("models", { text: box.value.trim(), limit: MOST }, { signal: asked.signal }));
        }
        catch (error) {
            if (error.name !== "AbortError")
                open(false);
        }
    };
    box.addEventListener("input", () => {
        clearTimeout(timer);
        timer = window.setTimeout(look, PAUSE);
    });
    box.addEventListener("focus", look);
    box.addEventListener("blur", () => {
        asked?.abort();
        open(false);
    });
    box.addEventListener("keydown", (event) => {
        if (event.key === "Escape")
            open(false);
        else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
            if (rows.length)
                mark((active + (event.key === "ArrowDown" ? 1 : rows.length - 1)) % rows.length);
            event.preventDefault();
        }
        else if (event.key === "Enter" && !list.hidden && rows[active])
            choose(rows[active]);
    });
    return element("div", { class: "picker" }, [box, list]);
}
