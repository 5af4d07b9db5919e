// Asks for the state every second and draws it: a small panel per metric of every probe, a line per run and page.
(() => {
  const root = document.getElementById("watch"), status = document.getElementById("status");
  const ns = "http://www.w3.org/2000/svg", shown = new Map();
  let previous = "";

  const make = (name, text = "", attributes = {}) => {
    const element = document.createElement(name);
    if (text !== "") element.textContent = text;
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };
  const draw = (name, attributes, text) => {
    const element = document.createElementNS(ns, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const short = v => v === 0 ? "0" : Math.abs(v) >= 1e4 || Math.abs(v) < 1e-3 ? v.toExponential(1) : String(+v.toPrecision(3));
  const link = (name, text) => make("a", text, { href: "files/" + name.split("/").map(encodeURIComponent).join("/"), target: "_blank" });
  const ago = seconds => seconds < 90 ? `${Math.max(0, Math.round(seconds))} s ago`
    : seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;

  // steps on a logarithmic axis, as Probe.plot draws them: what happens early is not squeezed into the left edge
  function curve(name, points) {
    const W = 300, H = 170, left = 52, right = 10, top = 8, bottom = 34;
    const real = points.filter(p => p[1] !== null);
    const svg = draw("svg", { viewBox: `0 0 ${W} ${H}`, role: "img",
      "aria-label": `${name}: ${real.length ? `${short(real.at(-1)[1])} at step ${real.at(-1)[0]}` : "no value yet"}` });
    const at = step => Math.log10(1 + step), last = Math.max(1, ...points.map(p => p[0]));
    let low = Math.min(...real.map(p => p[1])), high = Math.max(...real.map(p => p[1]));
    if (!real.length) { low = 0; high = 1; }
    if (high - low < 1e-12 * Math.max(1, Math.abs(high))) { const pad = Math.abs(high) * 0.1 || 1; low -= pad; high += pad; }
    const x = step => left + (W - left - right) * at(step) / at(last);
    const y = v => H - bottom - (H - top - bottom) * (v - low) / (high - low);
    svg.append(draw("path", { d: `M${left} ${top}V${H - bottom}H${W - right}`, class: "axis" }));
    for (const v of [low, (low + high) / 2, high])
      svg.append(draw("text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, short(v)));
    const ticks = [0];
    for (let s = 1; s <= last; s *= 10) ticks.push(s);
    for (const s of ticks) {
      svg.append(draw("path", { d: `M${x(s)} ${H - bottom}v4`, class: "axis" }));
      svg.append(draw("text", { x: x(s), y: H - bottom + 16, "text-anchor": "middle" }, s >= 1e4 ? short(s) : s));
    }
    svg.append(draw("text", { x: (left + W - right) / 2, y: H - 3, "text-anchor": "middle" }, "step"));
    let d = "", open = false; // a value that is missing leaves a gap
    for (const [s, v] of points) {
      if (v === null) { open = false; continue; }
      d += `${open ? "L" : "M"}${x(s).toFixed(1)} ${y(v).toFixed(1)}`;
      open = true;
    }
    svg.append(draw("path", { d, class: "line" }));
    if (real.length) svg.append(draw("circle", { cx: x(real.at(-1)[0]), cy: y(real.at(-1)[1]), r: 3 }));
    return svg;
  }

  function probe(entry) {
    const box = make("section");
    box.append(make("h2", entry.name === "." ? "This folder's probe" : entry.name));
    const skipped = entry.skipped ? `, ${entry.skipped} measurements skipped to keep the overhead cap` : "";
    box.append(make("p", `Step ${entry.step}${skipped}. Steps are on a logarithmic axis.`, { class: "note" }));
    for (const [metric, why] of Object.entries(entry.failed || {}))
      box.append(make("p", `${metric} has no value at this step: ${why}`, { class: "meaning skipped" }));
    const grid = make("div", "", { class: "curves" });
    for (const [name, points] of Object.entries(entry.curves)) {
      const figure = make("figure"), value = points.at(-1)[1];
      figure.append(make("figcaption", `${name} ${value === null ? "(no value)" : "= " + short(value)}`), curve(name, points));
      grid.append(figure);
    }
    box.append(grid);
    return box;
  }

  function table(title, header, rows) {
    const box = make("section"), inside = make("div", "", { class: "scroll", tabindex: 0 }), grid = make("table");
    const head = make("tr");
    for (const name of header) head.append(make("th", name, { scope: "col" }));
    grid.append(make("thead"), make("tbody"));
    grid.firstChild.append(head);
    for (const cells of rows) {
      const row = make("tr");
      for (const cell of cells) { const td = make("td"); td.append(cell); row.append(td); }
      grid.lastChild.append(row);
    }
    inside.append(grid);
    box.append(make("h2", title), inside);
    return box;
  }

  const fact = ([key, value]) => `${key} ${typeof value === "number" ? short(value) : value}`;

  function show(state) {
    const parts = [], now = Date.now() / 1000;
    for (const entry of state.probes) {
      if (!entry.problem) { parts.push(probe(entry)); continue; }
      const box = make("section");
      box.append(make("h2", entry.name), make("p", entry.problem, { class: "meaning skipped" }));
      parts.push(box);
    }
    if (state.runs.length) parts.push(table("Studies", ["Run", "Study", "Size", "Seed", "State", "Last lines"], state.runs.map(r =>
      r.problem ? [r.name, "", "", "", "cannot be read", r.problem] : [r.page ? link(`${r.name === "." ? "" : r.name + "/"}index.html`, r.name) : r.name,
        r.study, r.size, String(r.seed), r.finished ? "finished" : "running or stopped", Object.entries(r.last).map(fact).join(", ")])));
    if (state.pages.length) parts.push(table("Cards and pages", ["Page", "File", "Written"], state.pages.map(p =>
      p.problem ? [p.name, p.problem, ""] : [link(p.name, p.title), p.name, ago(now - p.changed)])));
    if (!parts.length) parts.push(make("p", "Nothing here yet. Make a probe with out=FOLDER, or run a study or a card into this folder; it appears by itself.", { class: "read" }));
    root.replaceChildren(...parts);
  }

  async function ask() {
    try {
      const answer = await fetch("state.json", { cache: "no-store", signal: AbortSignal.timeout(5000) });
      if (!answer.ok) throw new Error(String(answer.status));
      const text = await answer.text();
      if (text !== previous) show(JSON.parse(text));
      previous = text;
      status.textContent = "Live: this page follows the folder.";
    } catch {
      status.textContent = "Not connected: `biascope watch` has stopped. What is shown is the last state.";
    }
    setTimeout(ask, document.hidden ? 5000 : 1000);
  }
  ask();
})();
