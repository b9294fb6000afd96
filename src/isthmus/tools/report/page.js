"use strict";
(() => {
  let page = JSON.parse(document.getElementById("curves-data").textContent);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const dashes = { training: [], validation: [6, 3], test: [2, 3] };
  const height = 215;
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });

  function number(value) {
    if (value == null) return "";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e15)) return value.toExponential(2).replace(/\.?0+e/, "e");
    return size >= 1e4 ? compact.format(value) : String(Number(value.toPrecision(4)));
  }

  // One run: a colour for each part. Several: a colour for each run, and dashes for validation and test.
  function look(curve) {
    const several = page.runs > 1;
    const part = Object.keys(dashes).indexOf(curve.part);
    const colour = css(`--run-${several ? curve.run % 8 : part}`);
    return { stroke: colour, dash: several || part === 0 ? dashes[curve.part] : [] };
  }

  // Vertical lines at events, below the curves.
  function drawEvents(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = css("--muted");
    ctx.globalAlpha = 0.45;
    ctx.setLineDash([2, 4]);
    ctx.beginPath();
    for (const step of page.events) {
      const x = Math.round(plot.valToPos(step, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
    }
    ctx.stroke();
    ctx.restore();
  }

  // The mean of a thinned curve is drawn over the range of its values, which is pale.
  const ranges = (panel) => panel.curves.filter((curve) => curve.means);

  function aligned(panel) {
    return uPlot.join([
      ...ranges(panel).map((curve) => [curve.steps, curve.values]),
      ...panel.curves.map((curve) => (curve.means ? [curve.mean_steps, curve.means] : [curve.steps, curve.values])),
    ]);
  }

  function draw(panel, box) {
    const pale = ranges(panel).map((curve) => ({ ...look(curve), label: "", class: "range", width: 1, alpha: 0.3, points: { show: false } }));
    const axis = { stroke: css("--muted"), grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } };
    const series = panel.curves.map((curve) => ({
      label: curve.label, width: curve.means ? 2 : 1.5, ...look(curve), points: { show: hasPoints(curve), size: 4 },
      value: (_, value) => number(value) + (value == null ? "" : panel.unit === "%" ? "%" : ""),
    }));
    return new uPlot({
      width: box.clientWidth, height, scales: { x: { time: false } },
      cursor: { sync: { key: "step" }, drag: { x: true, y: false }, points: { size: 6 } },
      axes: [
        { ...axis, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? number(tick) : "")) },
        { ...axis, size: 62, values: (_, ticks) => ticks.map(number) },
      ],
      series: [{ label: "step", value: (_, step) => (step == null ? "" : String(step)) }, ...pale, ...series],
      hooks: {
        drawClear: [drawEvents],
        setSeries: [(plot, index, change) => {
          const range = ranges(panel).indexOf(panel.curves[index - 1 - pale.length]);
          if (range >= 0 && change.show != null) plot.setSeries(1 + range, { show: change.show }, false);
        }],
      },
    }, aligned(panel), box);
  }

  const hasPoints = (curve) => curve.steps.length < 40;
  // What draw() needs, without the values.
  const shape = ({ runs, panels }) => JSON.stringify([runs, panels.map(({ title, unit, curves }) =>
    [title, unit, curves.map((curve) => [curve.run, curve.part, curve.label, Boolean(curve.means), hasPoints(curve)])])]);

  let plots = [];
  function drawAll() {
    for (const plot of plots) plot.destroy();
    plots = page.panels.map((panel, index) => draw(panel, document.getElementById(`plot-${index}`)));
  }

  // The steps that somebody has zoomed to; null if all are visible.
  function zoom() {
    const steps = plots[0]?.data[0] ?? [];
    const { min, max } = plots[0]?.scales.x ?? {};
    return steps.length > 1 && (min > steps[0] || max < steps[steps.length - 1]) ? { min, max } : null;
  }

  // For live.js: newer data of the same page.
  window.reportCurves = {
    fits: (data) => shape(data) === shape(page),
    update(data) {
      const steps = zoom();
      page = data;
      plots.forEach((plot, index) => {
        plot.setData(aligned(page.panels[index]), steps === null);
        if (steps) plot.setScale("x", steps);
      });
    },
    // After the elements of the plots were replaced.
    redraw(data) {
      const steps = zoom();
      const name = (plot, series) => JSON.stringify([page.panels[plots.indexOf(plot)].title, series.label]);
      const hidden = new Set(plots.flatMap((plot) => plot.series.filter((series) => !series.show).map((series) => name(plot, series))));
      page = data;
      drawAll();
      for (const plot of plots) {
        plot.series.forEach((series, index) => {
          if (series.label && hidden.has(name(plot, series))) plot.setSeries(index, { show: false });
        });
        if (steps) plot.setScale("x", steps);
      }
    },
  };
  drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => window.reportCurves.redraw(page));
  new ResizeObserver(() => {
    for (const plot of plots) {
      const width = plot.root.parentElement.clientWidth;
      if (width !== plot.width) plot.setSize({ width, height });
    }
  }).observe(document.body);
})();
