// Interactive charts with uPlot: values under the pointer, logarithmic axes, downloads.
// The SVG of each chart remains for print and screen readers.
(() => {
  // uPlot throws if the browser's language is not a valid language tag.
  try {
    new Intl.NumberFormat(navigator.language);
  } catch {
    Object.defineProperty(navigator, "language", { value: "en" });
  }

  const COLOURS = ["#2f7ed8", "#d9722e", "#2e9e6b", "#a45bc9", "#c94f6d", "#8a7a2e"];
  const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [4, 2], [1, 2]];
  const HEIGHT = 260;

  const button = (text, onClick) => {
    const element = document.createElement("button");
    element.type = "button";
    element.className = "quiet";
    element.textContent = text;
    element.addEventListener("click", onClick);
    return element;
  };

  const save = (chart, svg) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
    link.download = `${chart.title.replace(/[^\p{L}\p{N}]+/gu, "-")}.svg`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };

  // At most seven powers of ten.
  const decades = (low, high) => {
    const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
    const stride = Math.max(1, Math.ceil((last - first + 1) / 7));
    return Array.from({ length: Math.floor((last - first) / stride) + 1 }, (_, index) => 10 ** (first + index * stride));
  };

  const power = (value) => {
    const exponent = Math.round(Math.log10(value));
    return Math.abs(exponent) < 4 ? String(Number(value.toPrecision(3))) : "10" + String(exponent).replace(/./g, (digit) => (digit === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]));
  };

  const createPlot = (holder, chart, log) => {
    const style = getComputedStyle(holder);
    const ink = style.color;
    const grid = style.getPropertyValue("--line");
    const shown = (x, y) => (!log.x || x > 0) && (!log.y || y > 0);
    const lines = chart.series.map((line) => ({ ...line, points: line.points.filter(([x, y]) => shown(x, y)) }));
    const xs = lines.flatMap((line) => line.points.map(([x]) => x));
    if (!xs.length) return null;
    const bounds = [Math.min(...xs), Math.max(...xs)];
    for (const line of chart.across) {
      if (shown(1, line.at)) lines.push({ ...line, points: bounds.map((x) => [x, line.at]), faint: true });
    }
    const tables = lines.map((line) => [line.points.map(([x]) => x), line.points.map(([, y]) => y)]);
    const value = (_, raw) => (raw == null ? "" : String(raw));
    const series = lines.map((line, index) => ({
      label: line.name,
      value,
      stroke: COLOURS[index % COLOURS.length],
      dash: DASHES[index % DASHES.length],
      width: line.dots ? 0 : line.faint ? 1 : 1.8,
      spanGaps: true,
      points: { show: Boolean(line.dots), size: 7, fill: COLOURS[index % COLOURS.length] },
      paths: line.dots ? () => null : line.stepped ? uPlot.paths.stepped({ align: 1 }) : uPlot.paths.linear(),
    }));
    const axis = (which) => ({
      label: chart[which].label,
      labelFont: "12px system-ui, sans-serif",
      stroke: ink,
      grid: { stroke: grid, width: 1 },
      ticks: { stroke: grid, width: 1 },
      labelSize: 20,
      size: which === "x" ? 44 : 62,
      ...(log[which] && { splits: (_, _axis, low, high) => decades(low, high), values: (_, splits) => splits.map(power), filter: (_, splits) => splits }),
    });
    const range = (which) => (_, low, high) => {
      const of = chart[which];
      const least = log[which] ? (of.low > 0 ? of.low : low) : of.low ?? low;
      const most = of.high ?? high;
      return least < most ? (log[which] ? uPlot.rangeLog(least, most, 10, true) : [least, most]) : [least - 1, most + 1];
    };
    return new uPlot(
      {
        width: Math.max(200, holder.clientWidth),
        height: HEIGHT,
        scales: {
          x: { time: false, distr: log.x ? 3 : 1, range: range("x") },
          y: { distr: log.y ? 3 : 1, range: range("y") },
        },
        axes: [axis("x"), axis("y")],
        series: [{ label: chart.x.label, value }, ...series],
        cursor: { drag: { x: true, y: true, uni: 20 } },
      },
      uPlot.join(tables),
      holder,
    );
  };

  const makeInteractive = (element, chart) => {
    const svg = element.querySelector("svg");
    const log = { x: chart.x.scale === "log", y: chart.y.scale === "log" };
    const holder = document.createElement("div");
    holder.className = "plot";
    const tools = document.createElement("p");
    tools.className = "tools";
    let plot = null;
    const redraw = () => {
      plot?.destroy();
      plot = createPlot(holder, chart, log);
      return plot;
    };
    const heading = document.createElement("p");
    heading.className = "plot-title";
    heading.textContent = chart.title;
    element.append(heading, holder, tools);
    if (!redraw()) {
      heading.remove();
      holder.remove();
      tools.remove();
      return;
    }
    for (const which of ["x", "y"]) {
      const toggle = button(`log ${which}`, () => {
        log[which] = !log[which];
        toggle.setAttribute("aria-pressed", String(log[which]));
        redraw();
      });
      toggle.setAttribute("aria-pressed", String(log[which]));
      tools.append(toggle);
    }
    tools.append(button("SVG", () => save(chart, svg.outerHTML.replaceAll("currentColor", "#1b1f24"))));
    element.classList.add("live");
    new ResizeObserver(() => {
      const width = Math.max(200, holder.clientWidth);
      if (plot && Math.abs(plot.width - width) > 2) plot.setSize({ width, height: HEIGHT });
    }).observe(holder);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  };

  const initialise = () => {
    for (const element of document.querySelectorAll(".chart[data-chart]")) {
      const chart = JSON.parse(element.dataset.chart);
      element.removeAttribute("data-chart");
      // A chart in a closed tab has no width yet.
      new IntersectionObserver((entries, observer) => {
        if (!entries.some((entry) => entry.isIntersecting)) return;
        observer.disconnect();
        makeInteractive(element, chart);
      }).observe(element);
    }
  };

  // uPlot is loaded after this script.
  addEventListener("DOMContentLoaded", () => {
    if (!window.uPlot) return;
    initialise();
    document.addEventListener("htmx:load", () => initialise());
  });
})();
