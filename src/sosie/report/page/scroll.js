// A table wider than its card has a shadow at the edge that hides something, and a line of text.

function hinted(area, hint = "Scroll sideways for more columns →") {
  const host = element("div", { class: "scroll-host" }, [
    element("p", { class: "quiet scroll-hint", "aria-hidden": "true" }, hint),
    element("div", { class: "scroll-shade" }, area),
  ]);
  const look = () => {
    const hidden = area.scrollWidth - area.clientWidth;
    host.toggleAttribute("data-wide", hidden > 1);
    host.toggleAttribute("data-left", area.scrollLeft > 1);
    host.toggleAttribute("data-right", hidden - area.scrollLeft > 1);
  };
  area.addEventListener("scroll", look, { passive: true });
  new ResizeObserver(look).observe(area);
  return host;
}
