// Where does a model belong that is not in the zoo? Its fingerprint is sent, looked up, and not kept.
import { ask } from "./api.js";
import { announce, card, counted, element, visible } from "./dom.js";
import { nearestTable } from "./nearest.js";
export async function uploadView({ zoo, signal }) {
    const place = element("div", { "aria-live": "polite" });
    const input = element("input", { type: "file", accept: ".safetensors", id: "file", change: () => { if (input.files?.[0])
            void send(input.files[0]); } });
    const most = `${(zoo.most_bytes / 2 ** 20).toFixed(0)} MiB`;
    const wrong = (text) => {
        place.replaceChildren(element("p", { class: "wrong", role: "alert" }, visible(text)));
    };
    const send = async (file) => {
        if (file.size > zoo.most_bytes) {
            wrong(`${file.name} has ${(file.size / 2 ** 20).toFixed(0)} MiB; a fingerprint of this zoo has at most ${most}.`);
            return;
        }
        place.replaceChildren(element("p", { class: "quiet" }, "looking …"));
        try {
            const found = await ask("near", { k: 20 }, { method: "POST", body: file, signal, headers: { "Content-Type": "application/octet-stream" } });
            place.replaceChildren(card(`Nearest to ${visible(file.name)}`, [
                element("p", { class: "quiet" }, `${visible(found.sent.architecture)}, ${counted(found.sent.sites.length, "layer")}. ${zoo.what.cka} on average, each layer with the one that fits it best.`),
                nearestTable(found, null),
            ]));
            announce(found.rows[0] ? `nearest is ${visible(found.rows[0].name)}` : "nothing is near");
        }
        catch (error) {
            if (error.name !== "AbortError")
                wrong(error.message);
        }
        input.value = "";
    };
    const drop = element("label", {
        class: "drop", for: "file",
        dragover: (event) => { event.preventDefault(); drop.classList.add("over"); },
        dragleave: () => drop.classList.remove("over"),
        drop: (event) => {
            event.preventDefault();
            drop.classList.remove("over");
            const file = event.dataTransfer?.files[0];
            if (file)
                void send(file);
        },
    }, [element("strong", {}, "Choose a fingerprint"), element("span", { class: "quiet" }, `or drop it here: .safetensors, at most ${most}`), input]);
    return {
        title: "Where does it belong?",
        content: [
            element("header", { class: "lead-in" }, [
                element("h1", {}, "Where does it belong?"),
                element("p", { class: "lead" }, "A fingerprint of a model that is not in the zoo is compared with all that are. Nothing of it is kept."),
            ]),
            card(null, [drop, element("details", {}, [
                    element("summary", {}, "How to make one"),
                    element("pre", {}, element("code", {}, [
                        "import sosie\nfrom sosie.zoo import fingerprint\n\n",
                        `zoo = sosie.Zoo("${zoo.name.replace(/["\\]/g, "")}")\n`,
                        "fingerprint(model, zoo.probe, size=zoo.settings.size, seed=zoo.settings.seed,\n            rows=zoo.settings.rows).save(\"mine.safetensors\")",
                    ])),
                    element("p", { class: "quiet" }, `The probe set of this zoo has ${zoo.n} inputs and the hash ${zoo.probe}.`),
                ])]),
            place,
        ],
    };
}
