// Two models, every layer of one against every layer of the other.
import { ask, numberOf } from "./api.js";
import { card, element, link, modelLink, named, written } from "./dom.js";
import { bestOf, heatmap } from "./heatmap.js";
import { picker } from "./picker.js";
import { colourOf } from "./scale.js";
export async function pairView({ zoo, parts, query, signal, go }) {
    const [a, b] = await Promise.all([0, 1].map((k) => numberOf(parts[k] ?? "", signal)));
    const kind = (query.get("kind") ?? zoo.kinds[0]);
    const short = query.get("short") === "1";
    const found = await ask(`pairs/${a}/${b}`, { kind, exact: kind === "cka" && !short }, { signal });
    const least = Math.min(...found.value.flat().filter((value) => value !== null));
    const ends = least < -0.05 ? [Number(least.toFixed(2)), 1] : [0, 1];
    const to = (one, other, how = kind) => `#/pair/${one}/${other}${how === "cka" ? "" : `?kind=${how}`}`;
    const drawn = heatmap({
        title: found.what, rowTitle: found.a.name, columnTitle: found.b.name, rows: found.a.sites, columns: found.b.sites,
        value: found.value, ends, best: true,
    });
    const tabs = found.kinds.map((one) => [zoo.what[one], to(a, b, one), one === kind && !short]);
    if (found.kinds.includes("cka"))
        tabs.splice(1, 0, ["CKA from short vectors", `#/pair/${a}/${b}?kind=cka&short=1`, short]);
    return {
        title: `${found.a.name} and ${found.b.name}`,
        content: [
            element("header", { class: "lead-in" }, [
                element("p", { class: "kicker" }, "How alike are they, layer by layer?"),
                element("h1", { class: "pair-title" }, [modelLink(found.a), element("span", { class: "quiet" }, " and "), modelLink(found.b)]),
                element("p", { class: "lead" }, sentence(found)),
            ]),
            element("div", { class: "tabs" }, [
                ...tabs.map(([text, href, current]) => link(href, text, current ? "tab current" : "tab")), link(to(b, a), "⇄ swap", "tab"),
            ]),
            element("div", { class: "columns" }, [
                card(null, [drawn.host, element("p", { class: "quiet note" }, note(found, ends)), drawn.saves(found.a.name, found.b.name, found.kind)]),
                element("div", { class: "stack" }, [
                    card("Best match of each layer", matches(found, ends)),
                    card("Another model", [
                        change(found.a, (id) => go(to(id, b)), "in place of "), change(found.b, (id) => go(to(a, id)), "in place of "),
                    ]),
                ]),
            ]),
        ],
    };
}
function sentence(found) {
    const best = found.value.map((row) => bestOf(row));
    const known = best.flatMap((j, i) => (j === null ? [] : [{ i, j, value: found.value[i][j] }])).sort((x, y) => y.value - x.value);
    if (!known.length)
        return "No layer of one can be compared with a layer of the other.";
    const [most, last] = [known[0], known.at(-1)];
    const mean = known.reduce((sum, one) => sum + one.value, 0) / known.length;
    return [
        "Most alike are ", named(found.a.sites[most.i]), " and ", named(found.b.sites[most.j]), ` (${written(most.value)}). `,
        ...(known.length > 1 ? ["The layer with the weakest best match is ", named(found.a.sites[last.i]), ` (${written(last.value)}); the mean over best matches is ${written(mean)}.`] : []),
    ];
}
function note(found, [far]) {
    const how = found.kind === "cka"
        ? found.exact ? "Debiased CKA on the probe set, from the whole vectors. " : "Estimated from the short vectors that a search goes by. "
        : found.kind === "weights" ? "Estimated from the weights alone, without data. " : "Of filter atoms at the same layer. ";
    return `${how}Framed: the best match of each row.${far < 0 ? " Values below 0 are less alike than chance." : ""}`;
}
function matches(found, ends) {
    const rows = found.value.flatMap((row, i) => {
        const j = bestOf(row);
        if (j === null)
            return [];
        const swatch = element("span", { class: "swatch square" });
        swatch.style.background = colourOf(row[j], ends);
        return [element("tr", {}, [
                element("td", {}, named(found.a.sites[i])), element("td", {}, named(found.b.sites[j])),
                element("td", { class: "number" }, [swatch, written(row[j])]),
            ])];
    });
    return element("div", { class: "scroll tall" }, element("table", {}, [
        element("thead", {}, element("tr", {}, [
            element("th", {}, named(found.a.name)), element("th", {}, named(found.b.name)), element("th", { class: "number" }, "value"),
        ])),
        element("tbody", {}, rows),
    ]));
}
function change(side, pick, text) {
    return element("div", { class: "other" }, [element("span", { class: "quiet" }, [text, named(side.name)]), picker("name of a model", (model) => pick(model.id))]);
}
