// Pointing at a heat map, with a pointer or with arrow keys: a frame around the cell, and a tip about it.

function pointing(svg, grid, plan) {
  const [rows, columns] = [grid.rows.length, grid.columns.length];
  const frame = shape("rect", { class: "frame", visibility: "hidden" });
  const across = shape("path", { class: "across", visibility: "hidden" });
  svg.append(across, frame);
  let cell = null;

  const show = (i, j, x, y) => {
    cell = [i, j];
    const { x: left, y: top, width, height } = box(plan, i, j);
    const attributes = { x: left - 1, y: top - 1, width: width + 2, height: height + 2, visibility: "visible" };
    filled(frame, attributes);
    const [midX, midY] = [left + width / 2, top + height / 2];
    const d = `M${plan.left - 5} ${midY}H${left - 1}M${midX} ${top + height + 1}V${plan.top + plan.mapHeight + 5}`;
    filled(across, { d, visibility: "visible" });
    showTip(grid.describe(i, j), x, y);
  };
  const leave = () => {
    frame.setAttribute("visibility", "hidden");
    across.setAttribute("visibility", "hidden");
    hideTip();
  };
  const under = (event) => {
    const area = svg.getBoundingClientRect();
    const j = Math.floor((event.clientX - area.left - plan.left) / plan.cellWidth);
    const i = Math.floor((event.clientY - area.top - plan.top) / plan.cellHeight);
    return i >= 0 && i < rows && j >= 0 && j < columns ? [i, j] : null;
  };
  const step = (i, j) => {
    const area = svg.getBoundingClientRect();
    const at = box(plan, clamp(i, 0, rows - 1), clamp(j, 0, columns - 1));
    show(clamp(i, 0, rows - 1), clamp(j, 0, columns - 1), area.left + at.x + at.width, area.top + at.y + at.height);
    announce(grid.say(...cell));
  };

  const point = (event) => {
    const found = under(event);
    if (found) show(...found, event.clientX, event.clientY);
    else leave();
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("click", (event) => under(event) && grid.choose?.(...under(event)));
  svg.addEventListener("keydown", (event) => {
    const [i, j] = cell ?? [0, 0];
    const moves = {
      ArrowUp: [i - 1, j], ArrowDown: [i + 1, j], ArrowLeft: [i, j - 1], ArrowRight: [i, j + 1],
      Home: [i, 0], End: [i, columns - 1], PageUp: [0, j], PageDown: [rows - 1, j],
    };
    if (event.key in moves) step(...(cell ? moves[event.key] : [0, 0]));
    else if ((event.key === "Enter" || event.key === " ") && cell && grid.choose) grid.choose(...cell);
    else return;
    event.preventDefault();
  });
}
