// The address after # says which view is shown.
import { ask } from "./api.js";
import { card, element, link, visible } from "./dom.js";
import { picker } from "./picker.js";
import { useRamp } from "./scale.js";
import { hideTip } from "./tip.js";
import { clustersView } from "./view_clusters.js";
import { duplicatesView } from "./view_duplicates.js";
import { mapView } from "./view_map.js";
import { modelView } from "./view_model.js";
import { modelsView } from "./view_models.js";
import { pairView } from "./view_pair.js";
import { runsView } from "./view_runs.js";
import { uploadView } from "./view_upload.js";
const VIEWS = {
    "": mapView, models: modelsView, model: modelView, pair: pairView, clusters: clustersView, duplicates: duplicatesView,
    runs: runsView, upload: uploadView,
};
const main = document.getElementById("view");
let leaving = new AbortController();
let first = true;
function go(address) {
    location.hash = address;
}
async function show() {
    leaving.abort();
    leaving = new AbortController();
    const { signal } = leaving;
    const [path, search] = location.hash.replace(/^#\/?/, "").split("?", 2);
    const [name, ...parts] = path.split("/").filter((part) => part !== "");
    hideTip();
    main.setAttribute("aria-busy", "true");
    try {
        const zoo = await ask("zoo", {}, { signal });
        useRamp(zoo.ramp);
        document.getElementById("zoo-name").textContent = visible(zoo.name);
        const view = VIEWS[name ?? ""];
        if (!view)
            throw new Error("There is no such page.");
        const shown = await view({ zoo, parts, query: new URLSearchParams(search), signal, go });
        if (signal.aborted)
            return;
        document.title = `${shown.title} · ${zoo.name} · sosie`;
        place(shown.content, name ?? "");
    }
    catch (error) {
        if (error.name === "AbortError" || signal.aborted)
            return;
        document.title = "sosie";
        place([card("That did not work", [element("p", { class: "wrong" }, visible(error.message)), link("#/", "Back to the map")])], "");
    }
}
function place(content, name) {
    main.replaceChildren(...content);
    main.removeAttribute("aria-busy");
    const section = { model: "models", pair: "models" }[name] ?? name;
    for (const tab of document.querySelectorAll("nav.sections a")) {
        const current = tab.getAttribute("href") === `#/${section}`;
        if (current) {
            tab.setAttribute("aria-current", "page");
            tab.scrollIntoView({ block: "nearest", inline: "nearest" }); // on small screens not all fit
        }
        else
            tab.removeAttribute("aria-current");
    }
    if (!first) {
        window.scrollTo(0, 0);
        main.focus({ preventScroll: true });
    }
    first = false;
}
document.getElementById("finder").append(picker("Find a model", (model) => go(`#/model/${model.id}`)));
window.addEventListener("hashchange", () => void show());
void show();
