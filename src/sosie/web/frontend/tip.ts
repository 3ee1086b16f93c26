// One tooltip for the whole page.

import { clamp, type Children, element } from "./dom.js";

const tip = element("div", { class: "tip", hidden: true, "aria-hidden": "true" });
document.body.append(tip);

export function showTip(children: Children, x: number, y: number): void {
  tip.replaceChildren(element("div", {}, children));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const right = x + 14 + width > window.innerWidth - 8 ? x - 14 - width : x + 14;
  const below = y + 16 + height > window.innerHeight - 8 ? y - 12 - height : y + 16;
  tip.style.left = `${clamp(right, 8, Math.max(window.innerWidth - width - 8, 8))}px`;
  tip.style.top = `${Math.max(below, 8)}px`;
}

export function hideTip(): void {
  tip.hidden = true;
}
