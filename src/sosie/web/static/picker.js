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
    let [pending, entered] = [false, false]; // Enter that comes before the answer is for the answer, not for what stood there
    const open = (shown) => {
        list.hidden = !shown;
        box.setAttribute("aria-expanded", String(shown));
        if (!shown)
            box.removeAttribute("aria-activedescendant");
    };
    const choose = (model) => {
        entered = false;
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
        pending = false;
        if (entered && rows[0])
            return choose(rows[0]);
        entered = false;
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
        const text = box.value.trim();
        try {
            const page = await ask("models", { text, limit: MOST }, { signal: asked.signal });
            if (text === box.value.trim())
                show(page);
        }
        catch (error) {
            if (error.name !== "AbortError")
                open(false);
        }
    };
    box.addEventListener("input", () => {
        clearTimeout(timer);
        [pending, entered] = [true, false];
        timer = window.setTimeout(look, PAUSE);
    });
    box.addEventListener("focus", look);
    box.addEventListener("blur", () => {
        clearTimeout(timer);
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
        else if (event.key === "Enter") {
            if (pending)
                entered = true;
            else if (!list.hidden && rows[active])
                choose(rows[active]);
        }
    });
    return element("div", { class: "picker" }, [box, list]);
}
