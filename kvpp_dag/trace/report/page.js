// What is chosen, and what the controls do.
const byId = (id) => document.getElementById(id);
const state = { recording: 0, number: null, stepped: [], step: -1, whole: [0, 1], lanes: [] };

const runOf = (forward, recording) => forward.runs.find((run) => run.recording === recording);
const forwardsOf = (recording) => data.forwards.filter((forward) => runOf(forward, recording));

function chosen() {
  const forward = data.forwards.find(({ number }) => number === state.number);
  return forward && { forward, run: runOf(forward, state.recording) };
}

/** The runs that a timeline can show beside the chosen one: those of its stage and clock, the chosen one first. */
function comparable({ forward, run }) {
  const { clock } = data.recordings[run.recording];
  return [run, ...forward.runs.filter((other) => other !== run && data.recordings[other.recording].clock === clock)];
}

function showChoice() {
  byId("rank").replaceChildren(...data.recordings.map((recording, i) => make("option", rankName(recording), { value: i })));
  byId("rank").value = state.recording;
  const forwards = forwardsOf(state.recording);
  byId("forward").replaceChildren(...forwards.map((forward) => {
    const { figures, error } = runOf(forward, state.recording);
    const text = `${forward.number}: ${ms(figures.duration)}, exposed ${ms(figures.exposed)}${error ? ", failed" : ""}`;
    return make("option", text, { value: forward.number });
  }));
  if (!forwards.some(({ number }) => number === state.number)) state.number = longest(forwards)?.number ?? null;
  byId("forward").value = state.number;
}

/** The forward with the most exposed time, the last of equals. */
function longest(forwards) {
  return forwards.reduce((best, forward) => {
    const exposed = (one) => runOf(one, state.recording).figures.exposed;
    return best && exposed(best) > exposed(forward) ? best : forward;
  }, null);
}

function show() {
  showChoice();
  const place = forwardsOf(state.recording).findIndex(({ number }) => number === state.number);
  byId("previous").disabled = place <= 0;
  byId("next").disabled = place < 0 || place >= forwardsOf(state.recording).length - 1;
  if (data.recordings.length) showPlan(data.recordings[state.recording]);
  const choice = chosen();
  for (const section of document.querySelectorAll("main section")) {
    section.hidden = !choice && !section.contains(byId("plan"));
  }
  if (!choice) {
    byId("about").textContent = "No forward was recorded here, so there is nothing to show.";
    byId("figures").replaceChildren();
    return;
  }
  const { run } = choice;
  const recording = data.recordings[run.recording];
  byId("about").textContent = `Forward ${state.number} of ${rankName(recording)}, of ${recording.ranks} ranks.`
    + (run.error ? ` It failed: ${run.error}` : "");
  byId("about").className = run.error ? "failed" : "";
  showFigures(run);
  showCauses(run);
  showGraph(run);
  draw();
}

/** Draw the charts; `keep` keeps the part of the timeline that is in view. */
function draw(keep = false) {
  const choice = chosen();
  if (!choice) return;
  const runs = comparable(choice);
  const { note, whole, lanes } = drawTimeline(byId("timeline"), runs, keep ? byId("timeline").layout.xaxis.range : null);
  Object.assign(state, { whole, lanes });
  const others = choice.forward.runs.filter((run) => !runs.includes(run)).map((run) => rankName(data.recordings[run.recording]));
  byId("timeline-note").textContent = [
    note, others.length ? `Not here, since stage or clock differ: ${others.join("; ")}.` : "",
  ].filter(Boolean).join(" ");
  drawLayers(byId("layers"), choice.run);
  byId("selected").textContent = "";
  state.stepped = spansOf(choice.run);
  state.step = -1;
}

function zoom(how) {
  const timeline = byId("timeline");
  if (how === "all") return Plotly.relayout(timeline, { "xaxis.range": [...state.whole] });
  const [low, high] = timeline.layout.xaxis.range;
  const [middle, half] = [(low + high) / 2, (high - low) / 2];
  const [shift, scale] = { in: [0, 0.5], out: [0, 2], left: [-half, 1], right: [half, 1] }[how];
  return Plotly.relayout(timeline, { "xaxis.range": [middle + shift - half * scale, middle + shift + half * scale] });
}

/** Choose the span `by` places on, say what it was, and bring it into view. */
function step(by) {
  if (!state.stepped.length) return;
  state.step = Math.min(Math.max(state.step + by, 0), state.stepped.length - 1);
  const span = state.stepped[state.step];
  byId("selected").textContent = describe(span).join("\n");
  const [low, high] = byId("timeline").layout.xaxis.range;
  const half = (high - low) / 2;
  const middle = span.start + span.length / 2;
  const range = middle < low || middle > high ? [middle - half, middle + half] : [low, high];
  const lane = laneOf(state.lanes, span);
  const shape = {
    type: "rect", x0: span.start, x1: span.start + span.length, y0: lane - 0.46, y1: lane + 0.46,
    line: { color: colour("accent"), width: 3 },
  };
  Plotly.relayout(byId("timeline"), { shapes: [shape], "xaxis.range": range });
}

function listen() {
  byId("choice").addEventListener("submit", (event) => event.preventDefault());
  byId("rank").addEventListener("change", (event) => { state.recording = Number(event.target.value); show(); });
  byId("forward").addEventListener("change", (event) => { state.number = Number(event.target.value); show(); });
  for (const [id, by] of [["previous", -1], ["next", 1]]) {
    byId(id).addEventListener("click", () => {
      const forwards = forwardsOf(state.recording);
      const place = forwards.findIndex(({ number }) => number === state.number);
      state.number = forwards[place + by].number;
      show();
    });
  }
  byId("zoom").addEventListener("click", ({ target }) => { if (target.dataset.zoom) zoom(target.dataset.zoom); });
  byId("timeline").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    step(by);
  });
  byId("timeline").on?.("plotly_click", ({ points }) => {
    byId("selected").textContent = describe(points[0].customdata).join("\n");
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));
  const print = (on) => { document.documentElement.classList.toggle("print", on); draw(true); };
  let resized;
  window.addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => draw(true), 100); });
  window.addEventListener("beforeprint", () => print(true));
  window.addEventListener("afterprint", () => print(false));
}

byId("notes").replaceChildren(...data.notes.map((note) => make("p", note, { class: "note" })));
show();
listen();
