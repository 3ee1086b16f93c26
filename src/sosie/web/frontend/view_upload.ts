// Where does a model belong that is not in the zoo? Its fingerprint is sent, looked up, and not kept.

import { ask, type Points, type Sent } from "./api.js";
import { announce, card, clamp, counted, element, visible, written } from "./dom.js";
import { grouped } from "./groups.js";
import { modelMap } from "./map.js";
import { nearestTable } from "./nearest.js";
import type { Shown, Visit } from "./visit.js";

export async function uploadView({ zoo, signal, go }: Visit): Promise<Shown> {
  const place = element("div", { "aria-live": "polite" });
  const input = element("input", { type: "file", accept: ".safetensors", id: "file", change: () => { if (input.files?.[0]) void send(input.files[0]); } });
  const most = `${(zoo.most_bytes / 2 ** 20).toFixed(0)} MiB`;
  const wrong = (text: string) => {
    place.replaceChildren(element("p", { class: "wrong", role: "alert" }, visible(text)));
  };
  const send = async (file: File) => {
    if (file.size > zoo.most_bytes) {
      wrong(`${file.name} has ${(file.size / 2 ** 20).toFixed(0)} MiB; a fingerprint of this zoo has at most ${most}.`);
      return;
    }
    place.replaceChildren(element("p", { class: "quiet" }, "looking …"));
    try {
      const found = await ask<Sent>("near", { k: 20, place: true }, { method: "POST", body: file, signal, headers: { "Content-Type": "application/octet-stream" } });
      const points = found.place ? await ask<Points>("map", { kind: found.kind }, { signal }) : null;
      place.replaceChildren(element("div", { class: "columns" }, [
        card(`Nearest to ${visible(file.name)}`, [
          element("p", { class: "quiet" }, `${visible(found.sent.architecture)}, ${counted(found.sent.sites.length, "layer")}. ${zoo.what.cka} on average, each layer with the one that fits it best.`),
          nearestTable(found, null),
        ]),
        card("On the map", points ? placed(file.name, found, points, go) : element("p", { class: "quiet" }, "The zoo changed while the map was made: send it again to see where it lies."), "small-map ahead"),
      ]));
      announce(found.rows[0] ? `nearest is ${visible(found.rows[0].name)}` : "nothing is near");
    } catch (error) {
      if ((error as Error).name !== "AbortError") wrong((error as Error).message);
    }
    input.value = "";
  };
  const drop = element("label", {
    class: "drop", for: "file",
    dragover: (event: DragEvent) => { event.preventDefault(); drop.classList.add("over"); },
    dragleave: () => drop.classList.remove("over"),
    drop: (event: DragEvent) => {
      event.preventDefault();
      drop.classList.remove("over");
      const file = event.dataTransfer?.files[0];
      if (file) void send(file);
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

function placed(name: string, found: Sent, points: Points, go: (address: string) => void): Node[] {
  const { x, y, models, stress } = found.place!;
  const drawn = modelMap(points.points, grouped(points.points, "architecture"), {
    height: (width) => clamp(width * 0.8, 260, 460), lines: false, open: (point) => go(`#/model/${point.id}`),
    marked: new Set(found.rows.slice(0, 5).map((row) => row.id)), sent: { name, x, y },
  });
  const rough = stress > 0.2 ? ": a rough sketch" : "";
  return [drawn.host, element("p", { class: "quiet note" },
    `The diamond, and the five nearest. It was put there by its distances to ${counted(models, "model")}, as the map puts a model among its landmarks (stress of these distances ${written(stress, 2)}${rough}). One that is like none of them lies near the middle.`)];
}
