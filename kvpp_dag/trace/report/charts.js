// The two charts. Every kind has a colour, and a pattern or label that tells it apart without colour.
const KINDS = [
  { key: "compute", name: "compute", pattern: "", label: false },
  { key: "attend", name: "attend", pattern: ".", label: true },
  { key: "broadcast", name: "broadcast", pattern: "/", label: true },
  { key: "wait", name: "exposed wait", pattern: "x", label: false },
];
const MAX_DRAWN = 20000; // spans of a timeline, so that a browser stays quick
const CONFIG = { displayModeBar: false, doubleClick: "reset", showTips: false };

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
// Plotly reads a little markup and entities in its texts; what comes from a recording must stay text.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const hover = (lines) => lines.flatMap((line) => line.match(/.{1,90}/gsu) ?? []).map(plain).join("<br>");
const kindOf = (span) => {
  if (span.kind !== "compute") return span.kind;
  return span.id.startsWith("attend[") ? "attend" : "compute";
};

function layoutOf(element, extra) {
  const axis = { gridcolor: colour("line"), linecolor: colour("line"), zerolinecolor: colour("line"), automargin: true };
  return {
    paper_bgcolor: colour("panel"), plot_bgcolor: colour("panel"), barmode: "overlay", bargap: 0.2,
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("ink") },
    margin: { l: 8, r: 12, t: 8, b: 44 }, hovermode: "closest", width: element.clientWidth,
    hoverlabel: { bgcolor: colour("panel"), bordercolor: colour("quiet"), font: { color: colour("ink"), size: 13 }, align: "left" },
    legend: { orientation: "h", y: 1, yanchor: "bottom", x: 0, xanchor: "left" },
    uniformtext: { mode: "hide", minsize: 10 },
    ...extra, xaxis: { ...axis, ...extra.xaxis }, yaxis: { ...axis, ...extra.yaxis },
  };
}

const fill = (kind) => ({
  color: colour(kind.key),
  pattern: { shape: kind.pattern, fillmode: "overlay", fgcolor: colour("panel"), fgopacity: 0.75, size: 6, solidity: 0.25 },
});

/** Draw the streams of `runs` from `range`, or whole. Returns the whole range, the lanes, and what is left out. */
function drawTimeline(element, runs, range) {
  const drawn = [];
  let count = 0;
  for (const run of runs) {
    const spans = spansOf(run);
    if (drawn.length && count + spans.length > MAX_DRAWN) break;
    count += spans.length;
    drawn.push({ run, spans: spans.slice(0, MAX_DRAWN), all: spans.length });
  }
  drawn.sort((a, b) => a.run.recording - b.run.recording);
  const lanes = lanesOf(drawn);
  const traces = KINDS.map((kind) => barsOf(kind, drawn, lanes)).filter((trace) => trace.x.length);
  traces.push(outlinesOf(drawn, lanes), eventsOf(drawn, lanes));
  const narrow = element.clientWidth < 600;
  const end = Math.max(...drawn.map(({ run }) => (run.offset + (run.ended ?? 0)) / 1e6),
    ...drawn.flatMap(({ spans }) => spans.map((span) => span.start + span.length)));
  const whole = [0, 1.01 * end || 1];
  const layout = layoutOf(element, {
    height: (narrow ? 210 : 96) + 38 * lanes.length,
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    xaxis: { title: { text: "ms after the first rank began", font: { size: 13 } }, range: [...(range ?? whole)] },
    yaxis: {
      fixedrange: true, range: [lanes.length - 0.5, -0.5], showgrid: false, zeroline: false,
      tickvals: lanes.map((_, lane) => lane), ticktext: lanes.map((lane) => plain(narrow ? lane.short : lane.name)),
    },
  });
  Plotly.react(element, traces, layout, CONFIG);
  return { whole, lanes, note: leftOut(runs, drawn) };
}

function leftOut(runs, drawn) {
  const few = drawn.find(({ spans, all }) => spans.length < all);
  if (few) return `The first ${MAX_DRAWN} of ${few.all} spans are drawn.`;
  if (drawn.length === runs.length) return "";
  return `${drawn.length} of ${runs.length} ranks are drawn, since a timeline holds up to ${MAX_DRAWN} spans; choose another rank to see it.`;
}

function lanesOf(drawn) {
  const lanes = [];
  for (const { run, spans } of drawn) {
    const recording = data.recordings[run.recording];
    for (const stream of [...new Set(spans.map((span) => span.stream))].sort()) {
      lanes.push({
        run, stream, name: `${rankName(recording)}, ${stream} `, short: `r${recording.rank} ${stream.slice(0, 8)} `,
      });
    }
  }
  return lanes;
}

const laneOf = (lanes, span) => lanes.findIndex((lane) => lane.run === span.run && lane.stream === span.stream);

function barsOf(kind, drawn, lanes) {
  const spans = drawn.flatMap(({ spans }) => spans.filter((span) => kindOf(span) === kind.key));
  return {
    type: "bar", orientation: "h", name: kind.name, legendrank: KINDS.indexOf(kind), width: 0.76,
    base: spans.map((span) => span.start), x: spans.map((span) => span.length),
    y: spans.map((span) => laneOf(lanes, span)), customdata: spans,
    text: kind.label ? spans.map((span) => String(span.layer ?? "")) : undefined,
    textposition: "inside", insidetextanchor: "middle", textangle: 0, insidetextfont: { color: colour("ink") },
    marker: {
      ...fill(kind),
      line: { color: colour("panel"), width: 0.5 },
    },
    hoverinfo: "text", hovertext: spans.map((span) => hover(describe(span))),
  };
}

function outlinesOf(drawn, lanes) {
  const spans = drawn.flatMap(({ spans }) => spans.filter((span) => span.critical && span.length));
  return {
    type: "bar", orientation: "h", name: "critical path", width: 0.76, hoverinfo: "skip",
    base: spans.map((span) => span.start), x: spans.map((span) => span.length),
    y: spans.map((span) => laneOf(lanes, span)),
    marker: { color: "rgba(0,0,0,0)", line: { color: colour("ink"), width: 2 } },
  };
}

function eventsOf(drawn, lanes) {
  const spans = drawn.flatMap(({ spans }) => spans.filter(({ kind }) => kind === "ready" || kind === "completion"));
  return {
    type: "scatter", mode: "markers", name: "events", visible: "legendonly", customdata: spans,
    x: spans.map((span) => span.start), y: spans.map((span) => laneOf(lanes, span)),
    marker: {
      size: 9, color: colour("event"),
      symbol: spans.map(({ kind }) => (kind === "ready" ? "triangle-down" : "triangle-up")),
    },
    hoverinfo: "text", hovertext: spans.map((span) => hover(describe(span))),
  };
}

/** Hidden and exposed time of every layer that was sent or waited for. */
function drawLayers(element, run) {
  const bar = (name, kind, pick) => ({
    type: "bar", name, x: run.layers.map(([layer]) => layer), y: run.layers.map((layer) => pick(layer) / 1e6),
    marker: fill(kind), hoverinfo: "text",
    hovertext: run.layers.map((layer) => hover([
      `layer ${layer[0]}: ${layerName(run, layer[0])}`,
      `transfer ${ms(layer[3])}, exposed ${ms(layer[4])}`,
      ...layer[5].map(([cause, ns, text]) => `${ms(ns)}: ${data.causes[cause][0]}: ${data.texts[text]}`),
    ])),
  });
  const layout = layoutOf(element, {
    height: 280, barmode: "stack", margin: { l: 8, r: 12, t: 8, b: 44 },
    dragmode: false, xaxis: { title: { text: "layer", font: { size: 13 } }, fixedrange: true, tickformat: "d", nticks: 20 },
    yaxis: { title: { text: "ms", font: { size: 13 } }, fixedrange: true, rangemode: "tozero" },
  });
  const hidden = bar("hidden", KINDS[2], (layer) => Math.max(0, layer[3] - layer[4]));
  return Plotly.react(element, [hidden, bar("exposed", KINDS[3], (layer) => layer[4])], layout, CONFIG);
}
