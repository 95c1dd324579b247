// Tables and figures. Every text from a recording enters the page as text.
function make(name, text, attributes = {}) {
  const element = document.createElement(name);
  if (text !== undefined && text !== null) element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

/** Columns are [title, class]; cells are texts or lists of texts. Roles outlive the narrow layout. */
function table(caption, columns, rows) {
  const element = make("table", null, { role: "table" });
  element.append(make("caption", caption));
  const head = make("tr", null, { role: "row" });
  head.append(...columns.map(([title, style]) => make("th", title, {
    scope: "col", role: "columnheader", class: style ?? "",
  })));
  element.append(make("thead"), make("tbody"));
  element.tHead.append(head);
  element.tBodies[0].append(...rows.map((cells) => {
    const row = make("tr", null, { role: "row" });
    row.append(...cells.map((cell, i) => {
      const [title, style] = columns[i];
      const part = make("td", null, { role: "cell", "data-label": title, class: style ?? "" });
      if (Array.isArray(cell)) part.append(...cell.map((text) => make("p", text)));
      else part.textContent = cell;
      return part;
    }));
    return row;
  }));
  return element;
}

function showFigures(run) {
  const f = run.figures;
  const share = (ns) => (f.duration ? `${percent(ns / f.duration)} of the forward` : "");
  const figures = [
    ["Duration", ms(f.duration), run.ended === null ? "still in flight when it was recorded" : ""],
    ["Exposed", ms(f.exposed), share(f.exposed)],
    ["Hidden share", percent(f.hidden), `of ${ms(f.transfer)} of transfers`],
    ["Overlap", `${f.overlap.toFixed(2)} %`, "of transfer time beside compute"],
    ["Bytes sent", bytes(f.bytes), `${f.bytes.toLocaleString("en")} bytes`],
    ["Bytes needed", f.needed === null ? "not recorded" : bytes(f.needed),
      f.needed !== null && f.bytes ? `${percent(f.needed / f.bytes)} of what was sent` : ""],
    ["If transfers took no time", ms(f.free_transfers), share(f.free_transfers)],
    ["If compute took no time", ms(f.free_compute), share(f.free_compute)],
  ];
  document.getElementById("figures").replaceChildren(...figures.map(([name, value, small]) => {
    const group = make("div");
    const figure = make("dd", value);
    if (small) figure.append(make("small", small));
    group.append(make("dt", name), figure);
    return group;
  }));
}

function showCauses(run) {
  const place = document.getElementById("causes");
  const totals = causeTotals(run);
  if (!totals.length) {
    place.replaceChildren(make("p", "Compute waited for no transfer in this forward."));
    document.getElementById("waits").replaceChildren(make("p", "None."));
    return;
  }
  place.replaceChildren(table(
    "Time that compute stood waiting, by cause",
    [["Cause"], ["Time", "number"], ["Share", "number"], ["Waits", "number"], ["What to try"]],
    totals.map(([cause, { ns, waits }]) => [
      data.causes[cause][0], ms(ns), percent(ns / run.figures.exposed), String(waits), data.causes[cause][1],
    ]),
  ));
  showWaits(run, 10);
}

function showWaits(run, count) {
  const waits = run.layers.filter((layer) => layer[4] > 0).sort((a, b) => b[4] - a[4]);
  const place = document.getElementById("waits");
  place.replaceChildren(table(
    `${Math.min(count, waits.length)} of ${waits.length} waits`,
    [["Layer", "number"], ["Name", "name"], ["Exposed", "number"], ["Transfer", "number"], ["Why"]],
    waits.slice(0, count).map(([layer, , , transfer, exposed, parts]) => [
      String(layer), layerName(run, layer), ms(exposed), ms(transfer),
      parts.map(([cause, ns, text]) => `${ms(ns)} ${data.causes[cause][0]}: ${data.texts[text]}`),
    ]),
  ));
  if (count >= waits.length) return;
  const more = make("button", `Show all ${waits.length} waits`, { type: "button" });
  more.addEventListener("click", () => showWaits(run, waits.length));
  place.append(more);
}

function showGraph(run) {
  const template = document.getElementById(`shape-${run.shape}`);
  const place = document.getElementById("graph");
  if (!template) {
    place.replaceChildren(make("p", "This graph is not drawn; see the note at the top."));
    return;
  }
  const picture = template.content.cloneNode(true);
  const critical = new Set(run.critical.map((node) => data.shapes[run.shape][node][0]));
  for (const node of picture.querySelectorAll("[data-node]")) {
    node.classList.toggle("critical", critical.has(node.dataset.node));
  }
  for (const edge of picture.querySelectorAll("[data-from]")) {
    edge.classList.toggle("critical", critical.has(edge.dataset.from) && critical.has(edge.dataset.to));
  }
  place.replaceChildren(picture);
}

/** Ordinals as spans: 0-4, 7. */
function ordinals(numbers) {
  const spans = [];
  for (const number of numbers) {
    const last = spans.at(-1);
    if (last && last[1] === number - 1) last[1] = number;
    else spans.push([number, number]);
  }
  return spans.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(", ") || "none";
}

function showPlan(recording) {
  const place = document.getElementById("plan");
  if (recording.plan === null) {
    place.replaceChildren(make("p", "This recording has no plan: its graphs were not built from one."));
    return;
  }
  const plan = data.plans[recording.plan];
  const size = (perBlock) => bytes(perBlock * recording.blocks);
  const ranks = table(
    `Bytes that each rank of stage ${recording.stage} stores, for ${recording.blocks.toLocaleString("en")} blocks`,
    [["Rank", "number"], ["Owned layers"], ["Owned", "number"], ["Drafts", "number"], ["Scratch", "number"], ["All", "number"]],
    plan.ranks.map((rank, number) => [
      String(number), ordinals(rank.layers), size(rank.owned), size(rank.drafts), size(rank.scratch), size(rank.all),
    ]),
  );
  const details = make("details");
  details.append(make("summary", `The ${plan.layers.length} layers, ${plan.slots} scratch slots`), table(
    "Bytes per block",
    [["Layer", "number"], ["Name", "name"], ["Owner", "number"], ["Slot", "number"], ["Bytes", "number"], ["Components"]],
    plan.layers.map((layer, i) => [
      String(i), layer.name, String(layer.owner), String(layer.slot), layer.bytes.toLocaleString("en"), layer.components,
    ]),
  ));
  place.replaceChildren(ranks, details);
}
