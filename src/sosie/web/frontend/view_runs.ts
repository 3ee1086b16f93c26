// Training over time: results that lie in the zoo's folder runs/, with a slider.

import { ask, type Run, type RunMeasure } from "./api.js";
import { announce, card, element, link, named, visible } from "./dom.js";
import { type Grid, heatmap } from "./heatmap.js";
import type { Shown, Visit } from "./visit.js";

const FRAME = 350; // ms a step is shown while it plays

export async function runsView(visit: Visit): Promise<Shown> {
  if (visit.query.has("name")) return runView(visit);
  const { rows } = await ask<{ rows: { name: string; bytes: number }[] }>("runs", {}, { signal: visit.signal });
  return {
    title: "Training",
    content: [
      element("header", { class: "lead-in" }, [element("h1", {}, "Training over time"), element("p", { class: "lead" }, "When does each layer settle?")]),
      card(null, rows.length
        ? element("ul", { class: "runs" }, rows.map((row) => element("li", {}, link(address(row.name), named(row.name)))))
        : element("p", {}, ["None yet. Save dynamics into the zoo's folder: ", element("code", {}, 'sosie.dynamics(…).save("zoo/runs/first.json")'), "."])),
    ],
  };
}

function address(name: string, measure?: string): string {
  return `#/runs?${new URLSearchParams(measure === undefined ? { name } : { name, measure })}`;
}

async function runView({ query, signal }: Visit): Promise<Shown> {
  const run = await ask<Run>("run", { name: query.get("name") }, { signal });
  const measure = run.measures.find((one) => one.name === query.get("measure")) ?? run.measures[0];
  const head = element("header", { class: "lead-in" }, [
    element("p", { class: "kicker" }, [link("#/runs", "Training"), ` · ${visible(run.what)}`]),
    element("h1", {}, [named(run.names[0], "title"), ...(run.two_runs ? [element("span", { class: "quiet" }, " and "), named(run.names[1], "title")] : [])]),
  ]);
  if (!measure) return { title: run.name, content: [head, card(null, "Nothing was measured.")] };
  const tabs = run.measures.length > 1 ? element("div", { class: "tabs" }, run.measures.map((one) =>
    link(address(run.name, one.name), visible(one.name), one === measure ? "tab current" : "tab"))) : null;
  return {
    title: run.name,
    content: [
      head, tabs, player(run, measure, signal),
      run.two_runs ? null : settled(run, measure),
      measure.caveats.length ? card("To be read with care", element("ul", {}, measure.caveats.map((text) => element("li", {}, visible(text))))) : null,
    ].filter((node) => node !== null),
  };
}

function player(run: Run, measure: RunMeasure, signal: AbortSignal): HTMLElement {
  const last = run.steps_a.length - 1;
  let [at, playing] = [last, 0];
  const grid = (): Grid => ({
    title: measure.name, rowTitle: "layer", columnTitle: run.two_runs ? `step of ${run.names[1]}` : "step", rows: run.sites,
    wide: true, columns: run.steps_b.map(String), value: measure.value.map((site) => site[at]), ends: measure.ends, closer: measure.closer,
    current: run.two_runs ? undefined : at, pick: run.two_runs ? undefined : (_, column) => move(column),
  });
  const drawn = heatmap(grid());
  const said = element("output", { class: "step" });
  const slider = element("input", { type: "range", min: 0, max: last, value: last, "aria-label": "Step", input: () => { stop(); move(Number(slider.value)); } });
  const play = element("button", { type: "button", class: "small", click: () => (playing ? stop() : start()) }, "play");
  const move = (next: number) => {
    at = next;
    slider.value = String(at);
    slider.setAttribute("aria-valuetext", `step ${run.steps_a[at]}`);
    said.textContent = `step ${run.steps_a[at].toLocaleString("en")}`;
    drawn.update(grid());
  };
  const stop = () => {
    clearInterval(playing);
    [playing, play.textContent] = [0, "play"];
  };
  const start = () => {
    if (at === last) move(0);
    [playing, play.textContent] = [window.setInterval(() => (at === last || signal.aborted ? stop() : move(at + 1)), FRAME), "stop"];
    announce("playing");
  };
  said.textContent = `step ${run.steps_a[at].toLocaleString("en")}`;
  const about = run.two_runs ? `How alike ${visible(run.names[0])} at this step is to ${visible(run.names[1])} at every step.` : "How alike the network at this step is to itself at every step, layer by layer.";
  return card(null, [
    element("div", { class: "player" }, [play, slider, said]),
    element("p", { class: "quiet note" }, about), drawn.host, drawn.saves(run.name, measure.name),
  ]);
}

function settled(run: Run, measure: RunMeasure): HTMLElement {
  const rows = run.sites.map((site, k) => element("tr", {}, [
    element("td", {}, named(site)), element("td", { class: "number" }, measure.settled[k] === null ? "later" : measure.settled[k].toLocaleString("en")),
  ]));
  return card(`The step from which each layer has settled (${measure.threshold} of the last state)`, element("div", { class: "scroll" }, element("table", { class: "narrow" }, [
    element("thead", {}, element("tr", {}, [element("th", {}, "layer"), element("th", { class: "number" }, "step")])), element("tbody", {}, rows),
  ])));
}
