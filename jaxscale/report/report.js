// The read-out of each chart: the values at the step nearest to the pointer, a finger, or the arrow keys.
for (const figure of document.querySelectorAll("figure.chart")) {
  const plot = figure.querySelector(".plot"), cursor = plot.querySelector(".cursor"), tip = plot.querySelector(".tip");
  const chart = JSON.parse(figure.querySelector("script").textContent);
  const all = [...new Set(chart.curves.flatMap((curve) => curve.steps))].sort((a, b) => a - b);
  let at = all.length - 1;
  const nearest = (steps, step) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (steps[middle] < step) low = middle; else high = middle; }
    return Math.abs(steps[low] - step) <= Math.abs(steps[high] - step) ? low : high;
  };
  const show = (index) => {
    at = Math.max(0, Math.min(all.length - 1, index));
    const step = all[at], across = (step - chart.left) / (chart.right - chart.left), reach = (chart.right - chart.left) / 80;
    tip.replaceChildren();
    const head = document.createElement("b");
    head.textContent = (chart.axis || "step") + " " + step.toLocaleString("en", { maximumFractionDigits: 1 });
    tip.append(head);
    for (const curve of chart.curves) {
      const place = nearest(curve.steps, step);
      if (Math.abs(curve.steps[place] - step) > reach) continue;
      const line = document.createElement("span"), dot = document.createElement("i"), value = document.createElement("u");
      line.className = "c" + curve.color;
      value.textContent = curve.texts[place];
      line.append(dot, curve.label, value);
      tip.append(line);
    }
    const near = chart.marks.filter(([where]) => Math.abs(where - step) <= reach / 2).map(([, label]) => label);
    if (near.length) {
      const line = document.createElement("span");
      line.textContent = [...new Set(near)].join(", ");
      tip.append(line);
    }
    plot.classList.add("on");
    cursor.style.left = 100 * across + "%";
    const wide = plot.clientWidth, x = across * wide, left = x > wide / 2 ? x - tip.offsetWidth - 12 : x + 12;
    tip.style.left = Math.max(-40, Math.min(wide - tip.offsetWidth + 8, left)) + "px";
  };
  const hide = () => plot.classList.remove("on");
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    show(nearest(all, chart.left + ((event.clientX - box.left) / box.width) * (chart.right - chart.left)));
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -25, PageDown: 25, Home: -all.length, End: all.length }[event.key];
    if (move) { show(at + move); event.preventDefault(); }
    if (event.key === "Escape") hide();
  });
}
