// Charts that the server has drawn answer the pointer with their values, and can be downloaded.
(() => {
  const SVG = "http://www.w3.org/2000/svg";

  const save = (title, svg) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
    link.download = `${title.replace(/[^\p{L}\p{N}]+/gu, "-")}.svg`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };

  // The value of a series at x, where it has one: nothing is interpolated.
  const valueAt = (series, x) => {
    const before = series.points.filter((point) => point[0] <= x).pop();
    return before && (series.stepped || before[0] === x) ? before[1] : null;
  };

  const makeInteractive = (element, chart) => {
    const svg = element.querySelector("svg");
    const drawing = svg.outerHTML.replaceAll("currentColor", "#1b1f24");
    const positions = [...new Map(chart.series.flatMap((series) => series.points.map(([x, , at]) => [x, at])))];
    const rule = document.createElementNS(SVG, "line");
    for (const [name, value] of Object.entries({ y1: chart.top, y2: chart.bottom, stroke: "currentColor", "stroke-opacity": 0.6, visibility: "hidden" })) rule.setAttribute(name, value);
    svg.append(rule);
    const readout = document.createElement("p");
    readout.className = "readout";
    readout.textContent = "Point at the chart to read values.";
    const tools = document.createElement("p");
    tools.className = "tools";
    const download = document.createElement("button");
    download.type = "button";
    download.className = "quiet";
    download.textContent = "SVG";
    download.addEventListener("click", () => save(chart.title, drawing));
    tools.append(download);
    element.append(readout, tools);
    const show = (event) => {
      const box = svg.getBoundingClientRect();
      const pointer = ((event.clientX - box.left) * chart.width) / box.width;
      const [x, at] = positions.reduce((best, next) => (Math.abs(next[1] - pointer) < Math.abs(best[1] - pointer) ? next : best));
      rule.setAttribute("x1", at);
      rule.setAttribute("x2", at);
      rule.setAttribute("visibility", "visible");
      const values = chart.series.map((series) => [series.name, valueAt(series, x)]).filter(([, value]) => value !== null);
      readout.textContent = [[chart.x, x], ...values].map(([name, value]) => `${name}: ${value}`).join("; ");
    };
    if (positions.length) for (const type of ["pointermove", "pointerdown"]) svg.addEventListener(type, show);
    element.classList.add("live");
  };

  const initialise = () => {
    for (const element of document.querySelectorAll(".chart[data-chart]")) {
      const chart = JSON.parse(element.dataset.chart);
      element.removeAttribute("data-chart");
      makeInteractive(element, chart);
    }
  };

  addEventListener("DOMContentLoaded", () => {
    initialise();
    document.addEventListener("htmx:load", initialise);
  });
})();
