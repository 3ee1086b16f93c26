// One tooltip for the whole page, kept inside the window.

const tip = element("div", { class: "tip", hidden: "" });
document.body.append(tip);

function showTip(children, x, y) {
  tip.replaceChildren(...children);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const space = 16;
  const right = x + space + width > innerWidth - 8 ? x - space - width : x + space;
  const below = y + space + height > innerHeight - 8 ? y - space - height : y + space;
  tip.style.left = `${clamp(right, 8, Math.max(8, innerWidth - width - 8))}px`;
  tip.style.top = `${clamp(below, 8, Math.max(8, innerHeight - height - 8))}px`;
}

function hideTip() {
  tip.hidden = true;
}

addEventListener("scroll", hideTip, { passive: true, capture: true });
addEventListener("keydown", (event) => event.key === "Escape" && hideTip());

function tipValue(text, note) {
  return element("p", { class: "tip-value" }, [element("strong", {}, text), note ? element("span", {}, note) : null]);
}

function tipFacts(facts) {
  const lines = facts.flatMap(([term, text]) => [element("dt", {}, term), element("dd", {}, text)]);
  return facts.length ? element("dl", { class: "tip-facts" }, lines) : null;
}

function tipSite(side, k) {
  return element("div", { class: "tip-site" }, [
    element("span", { class: "tip-side" }, named(side.name, "side")),
    named(side.sites[k]),
    element("span", { class: "quiet" }, `${side.shapes[k]}, ${side.widths[k].toLocaleString("en")} columns`),
  ]);
}

function tipNotes(texts) {
  const shown = texts.slice(0, 4).map((text) => element("li", {}, named(text, "words")));
  if (texts.length > 4) shown.push(element("li", {}, `and ${texts.length - 4} more`));
  return texts.length ? element("ul", { class: "tip-notes" }, shown) : null;
}
