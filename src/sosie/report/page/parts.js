// The parts of every page: cards, lists of facts, tabs, choices, and the parts of curves.

const content = document.getElementById("content");

function section(title, ...children) {
  return element("section", { class: "card" }, [element("h3", {}, title), ...children]);
}

function figure(title, notes, ...children) {
  return element("figure", { class: "card" }, [element("figcaption", {}, [element("h3", {}, title), ...notes]), ...children]);
}

function factList(facts) {
  return element("dl", { class: "facts" }, facts.flatMap(([term, text]) => [
    element("dt", {}, term), element("dd", {}, named(text, "words")),
  ]));
}

// How to read the numbers of a measure.
function readingFacts(measure) {
  const itself = measure.same === null ? "" : `; anything compared with itself has ${Number(measure.same.toPrecision(4))}`;
  return [["Range", measure.extent], ["Direction", measure.direction + itself]];
}

// A record, folded if it is long.
function record(title, lines, open = true) {
  const rows = lines.map(([key, text]) =>
    element("tr", {}, [element("th", { scope: "row" }, named(key)), element("td", {}, named(text, "words"))]));
  return element("details", { class: "card", open: open ? "" : null }, [
    element("summary", {}, element("h3", {}, title)),
    element("div", { class: "scroll" }, element("table", { class: "provenance" }, element("tbody", {}, rows))),
  ]);
}

// What a measure says, and where to read more.
function meaning({ meaning: words, papers }) {
  if (!words) return null;
  const links = papers.flatMap(([name, href]) => [" ", element("a", { href, rel: "noreferrer" }, name)]);
  return element("p", { class: "meaning" }, [named(words, "words"), ...links]);
}

// Below a figure: how it is drawn, and how to save it.
function tools(...children) {
  return element("div", { class: "tools" }, children);
}

// Arrow keys move between tabs, as in the standard pattern.
function tabs(names, current, select) {
  const choose = (k) => {
    const wanted = (k + names.length) % names.length;
    select(wanted);
    const tab = document.getElementById(`tab-${wanted}`);
    tab.focus({ preventScroll: true });
    tab.parentElement.scrollLeft = tab.offsetLeft - tab.parentElement.offsetLeft - 40;
  };
  return hinted(element("div", { class: "tabs", role: "tablist", "aria-label": "Measures" }, names.map((name, k) =>
    element("button", {
      type: "button", role: "tab", id: `tab-${k}`, "aria-selected": String(k === current),
      "aria-controls": `panel-${k}`, tabindex: k === current ? 0 : -1, click: () => choose(k),
      keydown: (event) => {
        if (event.key === "ArrowRight") choose(k + 1);
        if (event.key === "ArrowLeft") choose(k - 1);
      },
    }, named(name)))), "Scroll sideways for more measures →");
}

function panelOf(k, children) {
  return element("div", { class: "panel", role: "tabpanel", id: `panel-${k}`, "aria-labelledby": `tab-${k}` }, children);
}

function choice(attributes, title, checked) {
  const input = element("input", attributes);
  input.checked = checked;
  return element("label", { class: "choice" }, [input, title]);
}

function choices(name, label, options, current, change) {
  return element("div", { class: "switch", role: "radiogroup", "aria-label": label }, options.map(([value, title]) =>
    choice({ id: `${name}-${value}`, type: "radio", name, change: () => change(value) }, title, value === current)));
}

function stretchChoice(change, id = "stretch") {
  return choice({ id, type: "checkbox", change: (event) => change(event.target.checked) },
    " Stretch to the values found", state.stretched);
}

// Axes fit the values that are drawn, unless the whole range is wanted.
function wholeChoice(id, change) {
  return choice({ id, type: "checkbox", change: (event) => change({ whole: event.target.checked }) }, " Whole range", state.whole);
}

function legend(className, text) {
  return element("span", { class: `legend ${className}` }, [element("span", { class: "key" }, ""), text]);
}

function drawing(width, height, label, children, attributes = {}) {
  return shape("svg", {
    role: "img", width, height, viewBox: `0 0 ${width} ${height}`, "aria-label": label, ...attributes,
  }, children);
}

// A tip that follows the pointer over a drawing; hidden where there is nothing to show.
function tipped(node, describe) {
  node.addEventListener("pointermove", (event) => {
    const children = describe(event);
    if (children) showTip(children, event.clientX, event.clientY);
    else hideTip();
  });
  node.addEventListener("pointerleave", hideTip);
  return node;
}

function gridLines(plan) {
  return shape("g", { class: "grid" }, plan.ticks.flatMap(({ value, text }) => [
    shape("line", { x1: plan.left, x2: plan.width - 8, y1: plan.y(value), y2: plan.y(value) }),
    shape("text", { class: "label", x: plan.left - 8, y: plan.y(value) + 4, "text-anchor": "end" }, text),
  ]));
}

// The items between nulls.
function runs(items) {
  const found = [[]];
  for (const item of items) {
    if (item === null) found.push([]);
    else found.at(-1).push(item);
  }
  return found.filter((run) => run.length);
}

// A line with gaps at undefined points, and dots if wanted; a point between two gaps is always a dot.
function broken(points, { colour = null, dots = false } = {}) {
  return runs(points).flatMap((run) => [
    shape("path", { class: "stroke", stroke: colour, d: `M${run.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}` }),
    ...(dots || run.length === 1 ? run.map(([cx, cy]) => shape("circle", { class: "dot", cx, cy, r: 2.75, fill: colour })) : []),
  ]);
}
