// The first page: all models as points.
import { ask } from "./api.js";
import { card, choose, clamp, counted, element, link, visible, written } from "./dom.js";
import { downloads } from "./download.js";
import { clustered, grouped } from "./groups.js";
import { linesOf, modelMap } from "./map.js";
const BY = [["architecture", "architecture"], ["task", "task"], ["tag", "tag"], ["base", "base model"]];
const COLOURS = [...BY, ["cluster", "cluster"]];
export async function mapView({ zoo, query, signal, go }) {
    if (!zoo.models)
        return { title: "Map", content: [empty(zoo.name)] };
    const asked = (query.get("kind") ?? zoo.kinds[0]);
    const found = await ask("map", { kind: asked }, { signal });
    let by = (COLOURS.find(([name]) => name === query.get("by")) ?? usual(found))[0];
    const colouring = async () => (by === "cluster"
        ? clustered(found.points, await ask("clusters", { kind: asked }, { signal })) : grouped(found.points, by));
    let [grouping, only] = [await colouring(), null];
    const edges = linesOf(found.points).length;
    const drawn = modelMap(found.points, grouping, {
        height: (width) => clamp(Math.min(width * 0.8, window.innerHeight * 0.68), 300, 820),
        lines: edges > 0,
        open: (point) => go(`#/model/${point.id}`),
    });
    const legend = element("div", { class: "legend" });
    const told = element("span", { class: "quiet", role: "status" });
    const regroup = () => {
        drawn.regroup(grouping, only);
        legend.replaceChildren(...grouping.groups.map((group, k) => element("button", {
            type: "button", class: "group", "aria-pressed": String(only === k),
            click: () => { only = only === k ? null : k; regroup(); },
        }, [
            element("span", { class: group.colour === null ? "swatch grey" : `swatch group-${group.colour}` }),
            visible(group.name), element("span", { class: "quiet" }, String(group.count)),
        ])));
    };
    regroup();
    const tools = element("div", { class: "tools" }, [
        choose("Colour", COLOURS, by, (value) => {
            [by, only] = [value, null];
            told.textContent = by === "cluster" ? "grouping …" : "";
            colouring().then((next) => {
                if (by !== value)
                    return; // another was chosen meanwhile
                [grouping, told.textContent] = [next, ""];
                regroup();
            }, (error) => { if (error.name !== "AbortError")
                told.textContent = visible(error.message); });
        }),
        zoo.kinds.length > 1 ? choose("Measure", zoo.kinds.map((kind) => [kind, zoo.what[kind]]), asked, (kind) => go(`#/?kind=${kind}&by=${by}`)) : null,
        edges ? lineSwitch(edges, drawn.setLines) : null, told,
        element("span", { class: "zooming" }, [
            button("−", "Zoom out", () => drawn.zoom(1 / 1.6)), button("+", "Zoom in", () => drawn.zoom(1.6)), button("fit", "Show all", drawn.fit),
        ]),
    ]);
    return {
        title: "Map",
        content: [
            element("header", { class: "lead-in" }, [element("h1", {}, visible(zoo.name)), element("p", { class: "lead" }, lead(found, zoo.n))]),
            card(null, [tools, legend, drawn.host, element("p", { class: "quiet note" }, notes(found)), downloads([zoo.name, "map"], () => table(found), drawn.drawing)], "map-card"),
        ],
    };
}
function table(found) {
    return [["name", "x", "y", "architecture", "task", "tags"],
        ...found.points.map((p) => [p.name, p.x, p.y, p.architecture, p.task, p.tags.join(" ")])];
}
// What tells models apart at first sight: architectures if there are several, else tasks, else tags.
function usual(found) {
    return BY.find(([by]) => grouped(found.points, by).groups.length > 1) ?? BY[0];
}
function lead(found, n) {
    const on = found.kind === "cka" ? ` on ${n} probe inputs` : "";
    return `${counted(found.total, "model")}. Near each other: alike by ${found.what}${on}.`;
}
function notes(found) {
    const some = found.points.length < found.total ? `${found.points.length.toLocaleString("en")} of them are shown. ` : "";
    const rough = found.stress !== null && found.stress > 0.2 ? ": a rough sketch" : "";
    const stress = found.stress === null || found.stress < 0.005 ? "" : `Two dimensions cannot show all distances (stress ${written(found.stress, 2)}${rough}). `;
    return `${some}${stress}Drag to move; pinch, or click and scroll, to zoom; click a point to open it.`;
}
function lineSwitch(edges, set) {
    const box = element("input", { type: "checkbox", checked: true, change: () => set(box.checked) });
    return element("label", { class: "choice", title: counted(edges, "line") }, [box, element("span", {}, "lines to parents")]);
}
function button(text, title, click) {
    return element("button", { type: "button", class: "small", title, "aria-label": title, click }, text);
}
function empty(name) {
    return card("No models yet", [
        element("p", {}, ["Add some: ", element("code", {}, `sosie zoo add ${name} "first=small_cnn(seed=0)"`), ", then load this page again."]),
        link("#/upload", "Or see what a fingerprint file holds."),
    ]);
}
