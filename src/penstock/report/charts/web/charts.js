// Draws the charts of a page from the JSON blocks that penstock.report.charts wrote into it.
//
// A chart is a function from its block, the theme and the hidden series to an option of ECharts.
// Theme, legend and width change what goes in; the option is made anew and ECharts merges it, so
// that a zoom stays. All names reach the page as text nodes or canvas text, never as markup.
"use strict";
(() => {
  const THEMES = {
    light: {
      text: "#1b1f24", dim: "#57606a", grid: "#e3e8ed", back: "#ffffff", shade: "#8c959f26",
      on: "#ffffff", accent: "#c1121f", muted: "#6e7781",
      heat: ["#eef6fb", "#9ccbe3", "#3f93c0", "#0b5a86", "#062f4a"],
      colours: ["#0b6e99", "#c98a00", "#2f7d4f", "#7a4fbf", "#c2561f", "#12908e", "#9b2c6e",
        "#4d7c0f", "#1d4ed8", "#8a5a44"],
    },
    dark: {
      text: "#e6edf3", dim: "#9198a1", grid: "#2a313a", back: "#0d1117", shade: "#9198a133",
      on: "#0d1117", accent: "#ff6b76", muted: "#9aa4af",
      heat: ["#10202c", "#12506f", "#1f86b5", "#6cc4ea", "#e3f5ff"],
      colours: ["#4fb7e5", "#e6b93a", "#5cb88a", "#b795f2", "#ff9a6b", "#45d0cc", "#e87fbd",
        "#a3d14b", "#7aa2ff", "#cf9f86"],
    },
  };
  const SYMBOLS = ["circle", "rect", "triangle", "diamond", "emptyCircle", "emptyRect"];
  const DASHES = ["solid", [7, 3], [2, 3], [9, 3, 2, 3]];
  const NARROW = 560; // CSS pixels: below, axes have fewer labels
  const PAPER = 690; // CSS pixels of a sheet between its margins, A4 or letter
  const ZOOMED_LINES = 100; // places of a line chart from which on it can be zoomed
  let isPrinting = false;
  const FONT = 'system-ui,-apple-system,"Segoe UI",sans-serif';

  // -- numbers -------------------------------------------------------------------------------

  async function column(given) {
    if (Array.isArray(given)) return Float64Array.from(given, (v) => (v === null ? NaN : v));
    const bytes = Uint8Array.from(atob(given.packed), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const planes = new Uint8Array(await new Response(stream).arrayBuffer());
    const { length, bits, low, high } = given;
    const out = new Float64Array(length);
    const top = 2 ** bits - 1, step = (high - low) / (top - 1);
    let code = 0;
    for (let i = 0; i < length; i++) {
      let value = 0;
      for (let p = Math.ceil(bits / 8) - 1; p >= 0; p--) value = value * 256 + planes[p * length + i];
      code = given.is_delta ? code + value : value;
      const number = low + code * step;
      out[i] = code === top ? NaN : given.is_log ? Math.exp(number) : number;
    }
    return out;
  }

  const digits = (v, n = 3) => String(+v.toPrecision(n));

  function withPrefix(v, units, base) {
    let size = Math.abs(v), n = 0;
    while (size >= 999.5 && n < units.length - 1) { size /= base; v /= base; n++; }
    return `${digits(v)} ${units[n]}`;
  }

  function seconds(v) {
    const size = Math.abs(v);
    if (size === 0) return "0";
    if (size < 1e-6) return `${digits(v * 1e9)} ns`;
    if (size < 1e-3) return `${digits(v * 1e6)} µs`;
    if (size < 1) return `${digits(v * 1e3)} ms`;
    if (size < 180) return `${digits(v, 4)} s`;
    return size < 10800 ? `${digits(v / 60, 4)} min` : `${digits(v / 3600, 4)} h`;
  }

  const BYTES = ["B", "kB", "MB", "GB", "TB", "PB"];
  function text(axis, v) {
    if (!Number.isFinite(v)) return "–";
    if (axis.unit === "s") return seconds(v);
    if (axis.unit === "bytes") return withPrefix(v, BYTES, 1000);
    if (axis.unit === "bytes/s") return `${withPrefix(v, BYTES, 1000)}/s`;
    if (axis.unit === "share") return `${digits(v * 100)}%`;
    const number = Math.abs(v) >= 1000 ? v.toLocaleString("en", { maximumFractionDigits: 0 })
      : digits(v, 4);
    return axis.unit ? `${number} ${axis.unit}` : number;
  }

  // Labels of an axis are short: its unit stands in its name where it is not part of a number.
  function tick(axis, v) {
    if (axis.unit === "s" && axis.log && v >= 1) return `${digits(v, 6)} s`;
    if (["s", "bytes", "bytes/s", "share"].includes(axis.unit)) return text(axis, v * (axis.per || 1));
    return Math.abs(v) >= 1e4 ? withPrefix(v, ["", "k", "M", "G", "T"], 1000).trim() : digits(v, 6);
  }

  // Ticks are round numbers of seconds; long runs want round minutes or hours.
  function divideLongTimes(axis, columns) {
    axis.per = 1;
    if (axis.unit !== "s" || axis.log) return;
    let most = axis.high || 0;
    for (const c of columns) for (const v of c) if (v > most) most = v;
    axis.per = most >= 10800 ? 3600 : most >= 180 ? 60 : 1;
    if (axis.per === 1) return;
    for (const c of columns) for (let i = 0; i < c.length; i++) c[i] /= axis.per;
    for (const key of ["low", "high"]) if (axis[key] !== undefined) axis[key] /= axis.per;
  }

  const fullText = (axis, v) => text(axis, v * (axis.per || 1));

  function rangeOf(columns) {
    let low = Infinity, high = -Infinity;
    for (const c of columns) for (const v of c) { if (v < low) low = v; if (v > high) high = v; }
    return [low, high];
  }

  const pairs = (x, y) => {
    const out = new Float64Array(2 * x.length);
    for (let i = 0; i < x.length; i++) { out[2 * i] = x[i]; out[2 * i + 1] = y[i]; }
    return out;
  };

  // -- parts of options ----------------------------------------------------------------------

  const SHOWN_UNITS = ["", "s", "bytes", "bytes/s", "share"];
  const axisName = (axis) => SHOWN_UNITS.includes(axis.unit) ? axis.name
    : `${axis.name} (${axis.unit})`;

  function lookOf(axis, way, look) {
    const { theme, isNarrow } = look;
    const isX = way === "x";
    return {
      name: axisName(axis), nameLocation: isX ? "middle" : "end", nameGap: isX ? 28 : 12,
      nameTextStyle: { color: theme.dim, fontSize: 12, align: isX ? "center" : "left" },
      axisLine: { show: isX, lineStyle: { color: theme.dim } },
      axisTick: { show: isX, lineStyle: { color: theme.dim } },
      axisLabel: { color: theme.dim, fontSize: 12, hideOverlap: true },
      splitLine: { show: !isX, lineStyle: { color: theme.grid } },
      splitNumber: isNarrow && isX ? 3 : 5,
    };
  }

  function numberAxis(axis, way, look, columns, places) {
    const out = { type: axis.log ? "log" : "value", ...lookOf(axis, way, look) };
    out.axisLabel.formatter = (v) => tick(axis, v);
    if (axis.low !== undefined) out.min = axis.low;
    if (axis.high !== undefined) out.max = axis.high;
    const [low, high] = rangeOf(columns.map((c) => (axis.log ? c.filter((v) => v > 0) : c)));
    if (axis.log) out.logBase = high / low < 40 ? 2 : 10;
    if (way === "x" && low < high) {
      out.min ??= !axis.log && low > 0 && low < 0.05 * high ? 0 : low;
      out.max ??= high;
    }
    if (axis.log && places && places.length <= 10) {
      out.axisLabel.customValues = places;
      out.axisTick.customValues = places;
    }
    return out;
  }

  function nameAxis(axis, names, way, look) {
    const out = { type: "category", data: names, ...lookOf(axis, way, look) };
    out.splitLine.show = false;
    out.axisLine.show = true;
    out.axisTick.show = false;
    // On a narrow screen names get a third of it.
    if (way === "y") Object.assign(out.axisLabel, { width: look.width / 3.2, overflow: "truncate" });
    return out;
  }

  function markSeries(marks, look, axes) {
    const lines = marks.map((m) => ({
      name: m.label,
      // Above the chart, or at its right end above the line.
      label: m.x === undefined ? { position: "insideEndTop" }
        : { position: axes.isTopDown ? "start" : "end", distance: 4 },
      ...(m.x !== undefined ? { xAxis: m.x / (axes.x.per || 1) } : { yAxis: m.y / (axes.y.per || 1) }),
    }));
    return {
      type: "line", id: "marks", data: [], silent: true, tooltip: { show: false },
      markLine: {
        symbol: "none", silent: true, data: lines, precision: 15, // by default places are rounded
        lineStyle: { color: look.theme.muted, type: [5, 4], width: 1.5 },
        label: {
          formatter: "{b}", color: look.theme.dim, fontSize: 12,
          textBorderColor: look.theme.back, textBorderWidth: 3,
        },
      },
    };
  }

  function zooms(look, { y = false } = {}) {
    const slider = {
      type: "slider", id: "slider", show: !isPrinting, xAxisIndex: 0, filterMode: "none",
      height: 18, bottom: 6, left: 24, right: 24, showDataShadow: false, showDetail: false,
      brushSelect: false, borderColor: look.theme.grid, fillerColor: look.theme.shade,
      handleStyle: { color: look.theme.back, borderColor: look.theme.dim },
      moveHandleStyle: { color: look.theme.dim }, handleSize: "120%",
    };
    // It does nothing but keep the range of y, which a drag sets.
    const upright = { type: "inside", id: "y", disabled: true, yAxisIndex: 0, filterMode: "none" };
    return {
      dataZoom: y ? [slider, upright] : [slider],
      // The toolbox owns the rectangle that a drag selects; its own icons are not shown.
      toolbox: {
        left: -200, feature: { dataZoom: { yAxisIndex: y ? 0 : false, filterMode: "none" } },
      },
    };
  }

  const grid = (hasSlider) => ({
    left: 12, right: 20, top: 8, bottom: hasSlider ? 34 : 8,
    outerBoundsMode: "same", outerBoundsContain: "all",
  });

  function tip(head, rows) {
    const box = document.createElement("div");
    box.className = "tip";
    const add = (tag, words, parent) => {
      const node = document.createElement(tag);
      node.textContent = words;
      parent.append(node);
      return node;
    };
    if (head) add("b", head, box);
    for (const [colour, name, value] of rows) {
      const row = add("div", "", box);
      if (colour) add("i", "", row).style.background = colour;
      if (name) add("span", name, row);
      add("em", value, row);
    }
    return box;
  }

  // The number of a series is in its id: its index counts hidden ones and bands too.
  const numberOf = (params) => Number(params.seriesId.match(/\d+$/)[0]);

  const tooltip = (look, more) => ({
    confine: true, backgroundColor: look.theme.back, borderColor: look.theme.dim,
    textStyle: { color: look.theme.text, fontSize: 12, fontFamily: FONT }, ...more,
  });

  // -- the charts ----------------------------------------------------------------------------

  // Colours below 0 have a meaning: -1 stands out, -2 stands back.
  function seriesColour(one, number, look) {
    const { accent, muted, colours } = look.theme, chosen = one.colour ?? number;
    return chosen === -1 ? accent : chosen === -2 ? muted : colours[chosen % colours.length];
  }

  function bandSeries(x, low, high, colour, opacity, id) {
    const data = Array.from(x, (v, i) => [v, low[i], high[i]]);
    return {
      type: "custom", id, data, encode: { x: 0, y: [1, 2] }, silent: true, clip: true, z: 1,
      tooltip: { show: false },
      renderItem(params, api) {
        if (params.dataIndexInside !== 0) return null; // one polygon for all places
        const upper = data.map((d) => api.coord([d[0], d[2]]));
        const lower = data.map((d) => api.coord([d[0], d[1]])).reverse();
        return { type: "polygon", shape: { points: [...upper, ...lower] },
          style: { fill: colour, opacity } };
      },
    };
  }

  const lines = {
    series: (spec) => spec.lines,
    async load(spec) {
      for (const li of spec.lines) {
        for (const key of ["x", "y", "low", "high"]) if (li[key]) li[key] = await column(li[key]);
      }
      const of = (key) => spec.lines.map((li) => li[key]).filter(Boolean);
      divideLongTimes(spec.x, of("x"));
      divideLongTimes(spec.y, [...of("y"), ...of("low"), ...of("high")]);
      spec.places = [...new Set(spec.lines.flatMap((li) => [...li.x]))].sort((a, b) => a - b);
      spec.isZoomed = spec.places.length >= ZOOMED_LINES;
    },
    option(spec, look) {
      const series = [];
      const seen = spec.lines.filter((li) => !look.hidden.has(li.name));
      let under = new Float64Array(spec.lines[0].x.length);
      spec.lines.forEach((li, number) => {
        if (look.hidden.has(li.name)) return;
        const colour = seriesColour(li, number, look);
        let y = li.y;
        if (spec.is_stacked) {
          y = Float64Array.from(li.y, (v, i) => under[i] + (v || 0));
          series.push(bandSeries(li.x, under, y, colour, 0.55, `band${number}`));
          under = y;
        } else if (li.low) {
          series.push(bandSeries(li.x, li.low, li.high, colour, 0.18, `band${number}`));
        }
        series.push(lineSeries(li, number, y, colour, spec));
      });
      if (spec.marks.length) series.push(markSeries(spec.marks, look, spec));
      if (spec.shaded.length) series.push(shadeSeries(spec, look));
      const columns = seen.flatMap((li) => [li.y, li.low, li.high]).filter(Boolean);
      return {
        ...(spec.isZoomed ? zooms(look) : {}), grid: grid(spec.isZoomed), series,
        xAxis: numberAxis(spec.x, "x", look, spec.lines.map((li) => li.x), spec.places),
        yAxis: { ...numberAxis(spec.y, "y", look, columns),
          nameGap: spec.marks.some((m) => m.x !== undefined) ? 26 : 12 },
        tooltip: tooltip(look, { trigger: "axis", axisPointer: { type: "line" },
          formatter: (params) => linesTip(params, spec, look) }),
      };
    },
  };

  function lineSeries(li, number, y, colour, spec) {
    const isFew = li.x.length <= 60;
    const isStep = li.style.includes("step");
    const isPlain = spec.is_stacked || isStep;
    const dash = li.is_dashed ? [6, 4] : spec.lines.length > 1 && isFew && !isPlain
      ? DASHES[number % DASHES.length] : "solid";
    return {
      type: "line", id: `line${number}`, data: pairs(li.x, y), step: isStep ? "end" : false,
      symbol: SYMBOLS[number % SYMBOLS.length], symbolSize: 7,
      showSymbol: li.style === "points" || (isFew && !isPlain), z: li.colour === -1 ? 4 : 3,
      sampling: li.x.length > 4000 ? "lttb" : undefined,
      lineStyle: { width: li.style === "points" ? 0 : isPlain ? 1.2 : li.colour === -1 ? 2.6 : 1.8, color: colour,
        type: dash },
      itemStyle: { color: colour }, emphasis: { disabled: true },
      ...(li.style === "filled step" ? { areaStyle: { opacity: 0.35, color: colour } } : {}),
    };
  }

  function shadeSeries(spec, look) {
    const per = spec.x.per || 1;
    return {
      type: "line", id: "shades", data: [], silent: true, z: 0, tooltip: { show: false },
      markArea: { silent: true, itemStyle: { color: look.theme.shade },
        data: spec.shaded.map(([a, b]) => [{ xAxis: a / per }, { xAxis: b / per }]) },
    };
  }

  function linesTip(params, spec, look) {
    const shown = params.filter((p) => p.seriesId.startsWith("line"));
    if (!shown.length) return "";
    const rows = shown.map((p) => {
      const number = numberOf(p), li = spec.lines[number], i = p.dataIndex;
      let value = fullText(spec.y, li.y[i]);
      if (li.low) value += ` (${fullText(spec.y, li.low[i])} to ${fullText(spec.y, li.high[i])})`;
      return [seriesColour(li, number, look), li.name, value];
    });
    const first = shown[0], x = spec.lines[numberOf(first)].x[first.dataIndex];
    return tip(`${spec.x.name} ${fullText(spec.x, x)}`, rows);
  }

  const bars = {
    series: (spec) => spec.bars,
    async load(spec) {
      for (const b of spec.bars) b.values = await column(b.values);
      divideLongTimes(spec.value, spec.bars.map((b) => b.values));
      spec.x = spec.is_horizontal ? spec.value : spec.category;
      spec.y = spec.is_horizontal ? spec.category : spec.value;
      spec.isZoomed = false;
    },
    height: (spec) => spec.is_horizontal
      ? 80 + spec.categories.length * (spec.is_stacked ? 28 : 12 + 18 * spec.bars.length) : 0,
    option(spec, look) {
      const lying = spec.is_horizontal;
      const seen = spec.bars.filter((b) => !look.hidden.has(b.name));
      const value = numberAxis(spec.value, lying ? "x" : "y", look, seen.map((b) => b.values));
      if (lying) {
        // Bars begin at the axis; a logarithmic one begins below the smallest value.
        if (!spec.value.log) value.min = spec.value.low ?? 0;
        value.max = spec.value.high;
        value.splitLine.show = true;
      }
      const names = nameAxis(spec.category, spec.categories, lying ? "y" : "x", look);
      if (lying) Object.assign(names, { inverse: true, name: "" });
      const series = seen.map((b) => barSeries(b, spec, look));
      const marks = spec.marks.map((m) => (lying ? { label: m.label, x: m.y } : m));
      if (marks.length) series.push(markSeries(marks, look, spec));
      return {
        grid: { ...grid(false), ...(lying ? { top: marks.length ? 26 : 8, right: 56 } : {}) }, series,
        xAxis: lying ? value : names, yAxis: lying ? names : value,
        tooltip: tooltip(look, { trigger: "axis", axisPointer: { type: "shadow" },
          formatter: (params) => {
            const shown = params.filter((p) => p.seriesId.startsWith("bars"));
            if (!shown.length) return "";
            return tip(spec.categories[shown[0].dataIndex], shown.map((p) => {
              const b = spec.bars[numberOf(p)];
              return [p.color, seen.length > 1 ? b.name : "", fullText(spec.value, b.values[p.dataIndex])];
            }));
          } }),
      };
    },
  };

  function barSeries(b, spec, look) {
    const number = spec.bars.indexOf(b);
    const colour = seriesColour(b, number, look);
    return {
      type: "bar", id: `bars${number}`, stack: spec.is_stacked ? "all" : undefined,
      data: Array.from(b.values, (v, i) => ({
        value: Number.isNaN(v) ? null : v,
        itemStyle: { color: spec.highlighted.includes(i) ? look.theme.accent : colour },
      })),
      itemStyle: { color: colour }, barMaxWidth: 46, barMinHeight: 1, emphasis: { disabled: true },
      label: { show: spec.has_labels, color: look.theme.text, fontSize: 12,
        position: spec.is_horizontal ? "right" : "top",
        formatter: (p) => tick(spec.value, b.values[p.dataIndex]) },
    };
  }

  const sizeOfPoints = (inView) => (inView > 50000 ? 1.6 : inView > 5000 ? 3 : 5);

  const scatter = {
    series: (spec) => spec.points,
    async load(spec) {
      for (const g of spec.points) {
        g.x = await column(g.x);
        g.y = await column(g.y);
      }
      divideLongTimes(spec.x, spec.points.map((g) => g.x));
      divideLongTimes(spec.y, spec.points.map((g) => g.y));
      for (const g of spec.points) g.data = pairs(g.x, g.y);
      spec.isZoomed = true;
    },
    option(spec, look) {
      const total = spec.points.reduce((sum, g) => sum + g.x.length, 0);
      const isLarge = total > 5000, inView = total * look.share;
      const seen = spec.points.filter((g) => !look.hidden.has(g.name));
      return {
        ...zooms(look, { y: true }), grid: grid(true),
        xAxis: numberAxis(spec.x, "x", look, spec.points.map((g) => g.x)),
        yAxis: numberAxis(spec.y, "y", look, spec.points.map((g) => g.y)),
        series: seen.map((g) => ({
          type: "scatter", id: `points${spec.points.indexOf(g)}`, data: g.data, dimensions: ["x", "y"],
          symbolSize: sizeOfPoints(inView), large: isLarge, largeThreshold: 5000,
          progressive: isPrinting ? 0 : 100000, progressiveThreshold: 200000,
          itemStyle: { color: seriesColour(g, spec.points.indexOf(g), look), opacity: 0.75 },
        })),
        tooltip: tooltip(look, { trigger: "item", formatter: (p) => {
          const g = spec.points[numberOf(p)], i = p.dataIndex;
          return tip(g.name, [["", spec.x.name, fullText(spec.x, g.x[i])],
            ["", spec.y.name, fullText(spec.y, g.y[i])]]);
        } }),
      };
    },
  };

  const heatMap = {
    series: () => [],
    async load(spec) {
      spec.values = await column(spec.values);
      spec.isZoomed = false;
    },
    height: (spec) => Math.min(640, Math.max(220, 120 + spec.rows.length * 16)),
    option(spec, look) {
      const across = spec.columns.length, shown = spec.value.log ? Math.log10 : (v) => v;
      const data = [];
      spec.values.forEach((v, i) => {
        if (!Number.isNaN(v)) data.push([i % across, Math.floor(i / across), shown(v)]);
      });
      const [low, high] = rangeOf([data.map((d) => d[2])]);
      const bound = (key, value) => spec.value[key] === undefined ? value : shown(spec.value[key]);
      return {
        grid: { ...grid(false), bottom: 48 },
        xAxis: nameAxis(spec.column, spec.columns, "x", look),
        yAxis: { ...nameAxis(spec.row, spec.rows, "y", look), inverse: true, nameLocation: "start" },
        visualMap: {
          type: "continuous", min: bound("low", low), max: bound("high", high), calculable: true,
          orient: "horizontal", left: "center", bottom: 0, itemHeight: look.isNarrow ? 110 : 180,
          itemWidth: 12, inRange: { color: look.theme.heat }, textStyle: { color: look.theme.dim },
          formatter: (v) => tick(spec.value, spec.value.log ? 10 ** v : v),
        },
        series: [{ type: "heatmap", id: "cells", data, progressive: 0,
          itemStyle: { borderWidth: 0 }, emphasis: { itemStyle: { borderColor: look.theme.text,
            borderWidth: 1 } } }],
        tooltip: tooltip(look, { trigger: "item", formatter: (p) => {
          const [c, r] = p.value;
          return tip("", [["", spec.row.name, spec.rows[r]], ["", spec.column.name, spec.columns[c]],
            ["", spec.value.name, text(spec.value, spec.values[r * across + c])]]);
        } }),
      };
    },
  };

  const lanes = {
    series: (spec) => spec.spans,
    async load(spec) {
      for (const s of spec.spans) {
        for (const key of ["lanes", "starts", "ends"]) s[key] = await column(s[key]);
        s.lanes = s.lanes.map(Math.round);
      }
      divideLongTimes(spec.x, spec.spans.flatMap((s) => [s.starts, s.ends]));
      spec.y = { name: "", unit: "" };
      spec.isTopDown = true;
      spec.isZoomed = true;
    },
    height: (spec) => 106 + 30 * spec.lanes.length,
    option(spec, look) {
      const seen = spec.spans.filter((s) => !look.hidden.has(s.name));
      const series = seen.map((s) => laneSeries(s, spec, look));
      if (spec.marks.length) series.push(markSeries(spec.marks, look, spec));
      const ends = spec.spans.flatMap((s) => [s.starts, s.ends]);
      const names = nameAxis(spec.y, spec.lanes, "y", look);
      names.axisLabel.width = look.isNarrow ? 92 : 148;
      return {
        // Lanes of several charts begin at one place, so that their times can be compared.
        ...zooms(look), series, grid: { left: look.isNarrow ? 104 : 160, right: 28,
          top: spec.marks.length ? 26 : 12, bottom: 76, outerBoundsMode: "none" },
        xAxis: { ...numberAxis(spec.x, "x", look, ends), position: "bottom" },
        yAxis: { ...names, inverse: true },
        tooltip: tooltip(look, { trigger: "item", formatter: (p) => {
          const s = spec.spans[numberOf(p)], i = p.dataIndex;
          const rows = [["", "", fullText(spec.x, s.ends[i] - s.starts[i])],
            ["", "from", fullText(spec.x, s.starts[i])], ["", "kind", s.name]];
          if (s.notes[i]) rows.push(["", "", s.notes[i]]);
          return tip(s.labels[i], rows);
        } }),
      };
    },
  };

  function laneSeries(s, spec, look) {
    const number = spec.spans.indexOf(s), colour = seriesColour(s, number, look);
    return {
      type: "custom", id: `spans${number}`, clip: true, encode: { x: [0, 1], y: 2 },
      data: Array.from(s.starts, (start, i) => [start, s.ends[i], s.lanes[i]]),
      itemStyle: { color: colour }, progressive: 0,
      renderItem(params, api) {
        const [x, y] = api.coord([api.value(0), api.value(2)]);
        const width = Math.max(0.6, api.coord([api.value(1), api.value(2)])[0] - x);
        const height = Math.min(24, api.size([0, 1])[1] * 0.8), area = params.coordSys;
        const left = Math.max(x, area.x), right = Math.min(x + width, area.x + area.width);
        if (right <= left) return null;
        return {
          type: "rect",
          shape: { x: left, y: y - height / 2, width: right - left, height, r: Math.min(2, width / 4) },
          style: { fill: colour, opacity: s.is_faint ? 0.45 : 1, stroke: look.theme.back,
            lineWidth: width > 3 ? 0.6 : 0 },
          ...(right - left > 34 ? { textConfig: { position: "insideLeft", distance: 4 },
            textContent: { type: "text", style: { text: s.labels[params.dataIndex], fontSize: 11,
              fill: s.is_faint ? look.theme.text : look.theme.on, width: right - left - 8,
              overflow: "truncate", fontFamily: FONT } } } : {}),
        };
      },
    };
  }

  const KINDS = { lines, bars, scatter, lanes, "heat map": heatMap };

  // -- the page ------------------------------------------------------------------------------

  const root = document.documentElement;
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => !isPrinting
    && (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  const drawn = [];

  class Drawing {
    constructor(box, spec) {
      this.box = box;
      this.spec = spec;
      this.kind = KINDS[spec.kind];
      this.hidden = new Set();
    }

    async start() {
      await this.kind.load(this.spec);
      const height = this.kind.height ? this.kind.height(this.spec) : 0;
      if (height) this.box.style.height = `${height}px`;
      this.chart = echarts.init(this.box, null, { renderer: "canvas" });
      const finished = new Promise((done) => {
        this.chart.on("finished", () => done());
      });
      this.chart.on("datazoom", () => this.noteZoom());
      this.draw();
      // Where a finger scrolls the page a drag must not select; the slider remains.
      if (this.spec.isZoomed && !matchMedia("(pointer: coarse)").matches) this.selectByDrag();
      new ResizeObserver(() => this.resize()).observe(this.box);
      await finished;
    }

    draw() {
      const theme = isDark() ? THEMES.dark : THEMES.light;
      const width = this.box.clientWidth;
      this.isNarrow = width < NARROW;
      this.share = this.shareInView();
      const look = { theme, hidden: this.hidden, width, isNarrow: this.isNarrow, share: this.share };
      const option = this.kind.option(this.spec, look);
      this.chart.setOption({ animation: false, backgroundColor: "transparent",
        textStyle: { fontFamily: FONT, color: theme.text }, ...option },
      { replaceMerge: ["series"] });
      this.drawLegend(look);
    }

    drawLegend(look) {
      const row = this.box.parentElement.querySelector(".legend");
      const series = this.kind.series(this.spec);
      row.replaceChildren();
      if (series.length > 1) series.forEach((one, number) => row.append(this.entry(one, number, look)));
      if (!this.spec.isZoomed) return;
      const reset = document.createElement("button");
      Object.assign(reset, { type: "button", className: "reset", textContent: "Reset zoom" });
      reset.hidden = this.share > 0.9999;
      reset.addEventListener("click", () => this.resetZoom());
      row.append(reset);
    }

    entry(one, number, look) {
      const button = document.createElement("button"), swatch = document.createElement("i");
      button.type = "button";
      button.setAttribute("aria-pressed", String(!this.hidden.has(one.name)));
      swatch.style.background = seriesColour(one, number, look);
      if (one.is_faint) swatch.style.opacity = 0.45;
      button.append(swatch, one.name);
      button.addEventListener("click", () => {
        if (!this.hidden.delete(one.name)) this.hidden.add(one.name);
        this.draw();
      });
      return button;
    }

    selectByDrag() {
      this.chart.dispatchAction({ type: "takeGlobalCursor", key: "dataZoomSelect",
        dataZoomSelectActive: true });
      this.chart.getZr().on("dblclick", () => this.resetZoom());
    }

    shareInView() {
      const zooms = this.chart.getOption()?.dataZoom || [], width = new Map();
      for (const z of zooms) {
        const axis = z.yAxisIndex == null ? "x" : "y";
        width.set(axis, Math.min(width.get(axis) ?? 1, (z.end - z.start) / 100));
      }
      return [...width.values()].reduce((product, w) => product * w, 1);
    }

    noteZoom() {
      const reset = this.box.parentElement.querySelector(".reset"), share = this.shareInView();
      if (reset) reset.hidden = share > 0.9999;
      // Few points in view are drawn larger; not while ECharts still handles the zoom.
      const isLarger = share < 0.5 * this.share || share > 2 * this.share;
      if (this.spec.kind === "scatter" && isLarger) setTimeout(() => this.draw());
    }

    resetZoom() {
      this.chart.dispatchAction({ type: "dataZoom", start: 0, end: 100 }); // all axes
    }

    // A picture for the paper. It is there when the handler returns: the layers that ECharts draws
    // on are refreshed a frame later, which is too late for a printer.
    addSheet() {
      this.draw();
      this.chart.resize({ width: PAPER });
      this.sheet = this.chart.renderToCanvas({ pixelRatio: devicePixelRatio + 1 });
      Object.assign(this.sheet, { className: "sheet", style: "" }); // without the layer's place
      this.box.after(this.sheet);
    }

    removeSheet() {
      this.sheet.remove();
      this.chart.resize({ width: "auto" });
      this.draw();
    }

    resize() {
      if (!this.box.clientWidth || isPrinting) return;
      this.chart.resize();
      if (this.box.clientWidth < NARROW !== this.isNarrow) this.draw();
    }
  }

  function addThemeButton() {
    const button = document.getElementById("theme");
    const name = () => { button.textContent = isDark() ? "Light" : "Dark"; };
    const redraw = () => { name(); drawn.forEach((d) => d.draw()); };
    button.hidden = false;
    name();
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      redraw();
    });
    prefersDark.addEventListener("change", redraw);
    const folds = [];
    addEventListener("beforeprint", () => {
      isPrinting = true;
      drawn.forEach((d) => d.addSheet());
      for (const fold of document.querySelectorAll("details:not([open]):not(.numbers)")) {
        fold.open = true;
        folds.push(fold);
      }
    });
    addEventListener("afterprint", () => {
      isPrinting = false;
      drawn.forEach((d) => d.removeSheet());
      for (const fold of folds.splice(0)) fold.open = false;
    });
  }

  async function main() {
    addThemeButton();
    // Whoever waits for the page, such as a test, finds the charts and how many are drawn.
    window.penstockCharts = [];
    window.penstockChartsReady = 0;
    for (const block of document.querySelectorAll("script[data-chart]")) {
      const box = document.getElementById(`chart${block.dataset.chart}`);
      const drawing = new Drawing(box, JSON.parse(block.textContent));
      try {
        await drawing.start();
      } catch (error) {
        box.textContent = `This chart could not be drawn: ${error.message}`;
        console.error(error);
        continue;
      }
      drawn.push(drawing);
      window.penstockCharts.push(drawing.chart);
      window.penstockChartsReady += 1;
    }
  }
  main();
})();
