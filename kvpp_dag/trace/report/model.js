// The page's data (see data.py) and how figures are written. Nothing here touches charts.
const data = JSON.parse(document.getElementById("data").textContent);

const ms = (ns) => {
  const value = ns / 1e6;
  return `${value.toFixed(Math.abs(value) >= 100 ? 1 : Math.abs(value) >= 10 ? 2 : 3)} ms`;
};
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const bytes = (count) => {
  if (count < 1000) return `${count} B`;
  const unit = count < 1e6 ? [1e3, "kB"] : count < 1e9 ? [1e6, "MB"] : [1e9, "GB"];
  return `${(count / unit[0]).toFixed(2)} ${unit[1]}`;
};
const rankName = (recording) => {
  const stages = new Set(data.recordings.map((other) => other.stage)).size > 1;
  return stages ? `stage ${recording.stage}, rank ${recording.rank}` : `rank ${recording.rank}`;
};
const layerName = (run, layer) => data.names[data.recordings[run.recording].names][layer] ?? `layer_${layer}`;

/** Nodes of a run as objects with times in ms after the first rank's begin; nodes that never ran are left out. */
function spansOf(run) {
  const at = (ns) => (run.offset + ns) / 1e6;
  const critical = new Set(run.critical);
  const transfers = new Map(run.transfers.map(([node, submitted, gate]) => [node, { submitted, gate }]));
  const spans = [];
  data.shapes[run.shape].forEach(([id, kind, stream, layer, owner, slot], node) => {
    if (run.starts[node] === null) return;
    spans.push({
      run, node, id, kind, stream, layer, owner, slot, critical: critical.has(node), waited: false,
      start: at(run.starts[node]), length: run.lengths[node] / 1e6, bytes: data.bytes[run.bytes][node],
      ...transfers.get(node),
    });
  });
  for (const [node, start, length] of run.waits) {
    const [id, , , layer] = data.shapes[run.shape][node];
    spans.push({
      run, node, id, kind: "wait", stream: "compute", layer, critical: false, waited: true,
      start: at(start), length: length / 1e6, bytes: 0,
    });
  }
  return spans.sort((a, b) => a.start - b.start || a.node - b.node);
}

/** What there is to say about a span, a line each. */
function describe(span) {
  const recording = data.recordings[span.run.recording];
  const title = span.waited ? `wait for ${span.id} (exposed)` : span.id;
  const lines = [`${title} on ${rankName(recording)}, ${span.stream} stream`];
  if (span.layer !== null) lines.push(`layer ${span.layer}: ${layerName(span.run, span.layer)}`);
  const from = `${span.start.toFixed(3)} ms`;
  lines.push(span.length
    ? `${from} to ${(span.start + span.length).toFixed(3)} ms, took ${ms(span.length * 1e6)}`
    : `at ${from}`);
  if (span.owner !== null && span.owner !== undefined) {
    lines.push(`owner rank ${span.owner}, slot ${span.slot ?? "none"}`);
  }
  if (span.bytes) lines.push(`sent ${span.bytes.toLocaleString("en")} bytes${neededOf(span)}`);
  if (span.submitted !== undefined) lines.push(...startOf(span));
  if (span.waited) lines.push(...causesOf(span));
  if (span.critical) lines.push("on the critical path");
  return lines;
}

function neededOf(span) {
  const layer = span.run.layers.find(([number]) => number === span.layer);
  return layer && layer[2] !== null ? `, needed ${layer[2].toLocaleString("en")}` : ", needed: not recorded";
}

function startOf(span) {
  const { run, gate, submitted } = span;
  const lines = [];
  if (submitted !== null) lines.push(`submitted by the host at ${((run.offset + submitted) / 1e6).toFixed(3)} ms`);
  const started = (after) => `started ${ms(span.start * 1e6 - (run.offset + after))} after`;
  if (gate === -1) lines.push(`${started(submitted)} the host's hook submitted it`);
  if (gate !== null && gate >= 0) {
    const [id, kind] = data.shapes[run.shape][gate];
    const reached = kind === "ready" || kind === "completion" ? "was reached" : "ended";
    const at = run.starts[gate] + run.lengths[gate];
    lines.push(`${started(at)} ${id} ${reached} at ${((run.offset + at) / 1e6).toFixed(3)} ms`);
  }
  return lines;
}

function causesOf(span) {
  const layer = span.run.layers.find(([number]) => number === span.layer);
  return layer ? layer[5].map(([cause, ns, text]) => `${ms(ns)}: ${data.causes[cause][0]}: ${data.texts[text]}`) : [];
}

/** Per cause that occurs in a run: time, number of waits. */
function causeTotals(run) {
  const totals = new Map();
  for (const layer of run.layers) {
    for (const [cause, ns] of layer[5]) {
      const total = totals.get(cause) ?? { ns: 0, waits: 0 };
      totals.set(cause, { ns: total.ns + ns, waits: total.waits + 1 });
    }
  }
  return [...totals].sort((a, b) => b[1].ns - a[1].ns);
}
