"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const calls = data.calls, total = calls.id.length;
  const [DONE, ABORTED, LOST, OPEN] = [0, 1, 2, 3];
  const CYCLE = ["--blue", "--orange", "--green", "--purple", "--sky"];
  const byId = (id) => document.getElementById(id);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let colours = {};

  const make = (tag, text, name) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text; // never HTML: the text is the trace's
    if (name) element.className = name;
    return element;
  };
  const readColours = () => {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["--ground", "--raised", "--ink", "--muted", "--grid", "--vermilion", ...CYCLE])
      colours[name] = style.getPropertyValue(name).trim();
  };
  const tokenCount = (count) => count.toLocaleString("en") + (count === 1 ? " token" : " tokens");
  const versionColour = (number) => number < 0 ? colours["--muted"] : colours[CYCLE[number % CYCLE.length]];

  // ---- lanes: the calls of a server in rows, so that no two of a row overlap
  const lanes = data.servers.map((name) => ({ name, rows: [], calls: [] }));
  const rowOf = new Int32Array(total);
  const chosenCalls = new Set();
  let byTime = false, rowHeight = 16, places = [], height = 0, selected = -1;
  const startOf = (i) => byTime ? calls.t0[i] : calls.i0[i];
  const lastEvent = data.bounds[2], lastTime = data.bounds[3];
  const endOf = (i) => calls.i1[i] < 0 ? (byTime ? lastTime : lastEvent) : byTime ? calls.t1[i] : calls.i1[i];
  for (let i = 0; i < total; i++) {
    lanes[calls.server[i]].calls.push(i);
    if (calls.request[i] >= 0 && calls.request[i] === data.chosen) chosenCalls.add(calls.id[i]);
  }
  for (const moment of data.story) if (moment[2] !== null) chosenCalls.add(moment[2]);
  const pack = () => {
    for (const lane of lanes) {
      lane.rows = [];
      lane.calls.sort((a, b) => startOf(a) - startOf(b));
      for (const i of lane.calls) {
        let row = lane.rows.findIndex((end) => end <= startOf(i));
        if (row < 0) row = lane.rows.push(0) - 1;
        lane.rows[row] = endOf(i);
        rowOf[i] = row;
      }
    }
    const rows = lanes.reduce((sum, lane) => sum + Math.max(1, lane.rows.length), 0);
    rowHeight = Math.max(4, Math.min(22, Math.floor(900 / Math.max(1, rows))));
    places = new Array(lanes.length);
    height = AXIS;
    for (const number of data.order) {
      places[number] = height;
      height += HEAD + Math.max(1, lanes[number].rows.length) * rowHeight + 8;
    }
    height = Math.min(height + 4, 12000);
  };
  const AXIS = 26, HEAD = 20;

  // ---- the view: a part of the axis
  const full = () => {
    const [low, high] = byTime ? [data.bounds[1], data.bounds[3]] : [data.bounds[0], data.bounds[2]];
    const room = Math.max((high - low) * 0.02, byTime ? 1e-6 : 0.5);
    return [low - 3 * room, high + room]; // the names of the servers are at the left
  };
  let [from, to] = [0, 1];
  const canvas = byId("lanes"), pen = canvas.getContext("2d");
  let width = 300, asked = false;
  const xOf = (value) => (value - from) / (to - from) * width;
  const redraw = () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; draw(); });
  };
  const fitCanvas = () => {
    const ratio = Math.min(devicePixelRatio || 1, height > 6000 ? 1 : 2);
    width = canvas.parentElement.clientWidth;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    redraw();
  };
  const move = (low, high) => {
    const [a, b] = full(), least = byTime ? (b - a) / 1e5 : 2;
    let size = Math.min(Math.max(high - low, least), b - a);
    low = Math.min(Math.max(low, a), b - size);
    [from, to] = [low, low + size];
    redraw();
  };
  const zoom = (factor, at = (from + to) / 2) => move(at - (at - from) * factor, at + (to - at) * factor);
  const here = () => {
    const moments = data.story.filter((moment) => moment[0] >= 0);
    if (!moments.length) return;
    const values = moments.map((moment) => moment[byTime ? 1 : 0]);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const room = Math.max((high - low) * 0.15, byTime ? 1e-6 : 3);
    move(low - room, high + room);
    const first = calls.id.findIndex((id) => chosenCalls.has(id));
    if (first >= 0) canvas.parentElement.scrollTop = Math.max(0, topOf(first) - 120);
  };
  const topOf = (i) => places[calls.server[i]] + HEAD + rowOf[i] * rowHeight;

  // ---- drawing
  const ticks = () => {
    const rough = (to - from) / Math.max(2, width / 110), power = 10 ** Math.floor(Math.log10(rough));
    let step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) || power * 10;
    if (!byTime) step = Math.max(1, Math.round(step));
    const out = [];
    for (let value = Math.ceil(from / step) * step; value <= to; value += step) out.push(value);
    return out.map((value) => [value, byTime ? +value.toPrecision(6) + " s" : String(Math.round(value))]);
  };
  const draw = () => {
    pen.fillStyle = colours["--ground"];
    pen.fillRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (const [value, label] of ticks()) {
      pen.fillStyle = colours["--grid"];
      pen.fillRect(xOf(value), AXIS - 6, 1, height);
      pen.fillStyle = colours["--muted"];
      pen.fillText(label, xOf(value) + 3, AXIS / 2);
    }
    lanes.forEach((lane, number) => {
      const y = places[number];
      pen.fillStyle = colours["--grid"];
      pen.fillRect(0, y, width, 1);
      drawPauses(number);
    });
    const dim = chosenCalls.size > 0 && chosenCalls.size < total;
    for (let i = 0; i < total; i++) drawCall(i, dim && !chosenCalls.has(calls.id[i]));
    for (const mark of data.marks) drawMark(mark);
    lanes.forEach((lane, number) => {
      pen.font = "600 12px system-ui, sans-serif";
      const label = lane.name.length > 40 ? lane.name.slice(0, 39) + "…" : lane.name;
      const size = pen.measureText(label).width;
      pen.fillStyle = colours["--ground"];
      pen.fillRect(2, places[number] + 2, size + 8, HEAD - 4);
      pen.fillStyle = colours["--ink"];
      pen.fillText(label, 6, places[number] + HEAD / 2 + 1);
    });
    for (const moment of data.story) if (moment[3] && moment[0] >= 0) {
      const x = xOf(moment[byTime ? 1 : 0]);
      pen.strokeStyle = colours["--vermilion"];
      pen.lineWidth = 2;
      pen.setLineDash([5, 4]);
      pen.beginPath(); pen.moveTo(x, AXIS - 4); pen.lineTo(x, height); pen.stroke();
      pen.setLineDash([]);
      pen.font = "600 12px system-ui, sans-serif";
      const label = "broken here", size = pen.measureText(label).width;
      const left = Math.min(Math.max(2, x - size / 2), width - size - 2);
      if (x >= 0 && x <= width) {
        pen.fillStyle = colours["--ground"];
        pen.fillRect(left - 2, 2, size + 4, 18);
        pen.fillStyle = colours["--vermilion"];
        pen.fillText(label, left, 11);
      }
    }
  };
  const drawCall = (i, dim) => {
    const x0 = xOf(startOf(i)), x1 = Math.max(xOf(endOf(i)), x0 + 1.5);
    if (x1 < 0 || x0 > width) return;
    const y = topOf(i), h = rowHeight - (rowHeight > 6 ? 3 : 1);
    pen.globalAlpha = dim ? 0.35 : 1;
    const weights = calls.weights[i], sampled = Math.max(1, calls.sampled[i]);
    if (calls.state[i] === OPEN || !weights.length) {
      pen.fillStyle = colours["--grid"];
      pen.fillRect(x0, y, x1 - x0, h);
    }
    let x = x0;
    for (let k = 0; k < weights.length; k += 2) {
      const next = x + (x1 - x0) * weights[k + 1] / sampled;
      pen.fillStyle = versionColour(weights[k]);
      pen.fillRect(x, y, next - x, h);
      x = next;
    }
    pen.globalAlpha = 1;
    if (calls.state[i] === ABORTED || calls.state[i] === LOST) {
      pen.strokeStyle = colours["--vermilion"];
      pen.lineWidth = 2;
      const r = Math.min(5, Math.max(2, h / 2)), cx = x1, cy = y + h / 2;
      pen.beginPath();
      pen.moveTo(cx - r, cy - r); pen.lineTo(cx + r, cy + r);
      if (calls.state[i] === ABORTED) { pen.moveTo(cx - r, cy + r); pen.lineTo(cx + r, cy - r); }
      pen.stroke();
    }
    if (chosenCalls.has(calls.id[i]) || i === selected) {
      pen.strokeStyle = colours[i === selected ? "--vermilion" : "--ink"];
      pen.lineWidth = i === selected ? 2.5 : 1.5;
      pen.strokeRect(x0, y, x1 - x0, h);
    }
    if (rowHeight >= 14 && x1 - x0 > 60) {
      const name = calls.request[i] < 0 ? "call " + calls.id[i] : data.requests[calls.request[i]];
      pen.save();
      pen.beginPath(); pen.rect(x0, y, x1 - x0, h); pen.clip();
      pen.font = "11px system-ui, sans-serif";
      const label = name.slice(0, 60) + ", " + tokenCount(calls.sampled[i]);
      const size = pen.measureText(label).width, at = Math.max(x0, 0) + 4;
      pen.fillStyle = colours["--ground"];
      pen.globalAlpha = 0.85;
      pen.fillRect(at - 2, y + 2, size + 4, h - 4);
      pen.globalAlpha = 1;
      pen.fillStyle = colours["--ink"];
      pen.fillText(label, at, y + h / 2 + 1);
      pen.restore();
    }
  };
  const bottomOf = (number) => places[number] + HEAD + Math.max(1, lanes[number].rows.length) * rowHeight;
  const drawPauses = (number) => {
    let begun = null;
    const band = (x0, x1) => {
      pen.fillStyle = colours["--muted"];
      pen.globalAlpha = 0.18;
      pen.fillRect(x0, places[number], Math.max(2, x1 - x0), bottomOf(number) - places[number]);
      pen.globalAlpha = 1;
    };
    for (const mark of data.marks) {
      if (mark[1] !== number) continue;
      const x = xOf(mark[byTime ? 3 : 2]);
      if (mark[0] === "pause" && begun === null) begun = x;
      if (mark[0] === "resume" && begun !== null) { band(begun, x); begun = null; }
    }
    if (begun !== null) band(begun, width);
  };
  const drawMark = ([kind, server, index, time, , version]) => {
    const x = xOf(byTime ? time : index);
    if (x < -10 || x > width + 10) return;
    const top = server < 0 ? AXIS : places[server], bottom = server < 0 ? height : bottomOf(server);
    if (kind === "weights") {
      pen.fillStyle = versionColour(version);
      pen.fillRect(x - 1, top, 2, bottom - top);
      pen.beginPath(); pen.moveTo(x - 6, top + 3); pen.lineTo(x + 6, top + 3); pen.lineTo(x, top + 13); pen.fill();
      pen.font = "11px system-ui, sans-serif";
      pen.fillStyle = colours["--ink"];
      if (data.marks.length < 200 || to - from < (data.bounds[2] - data.bounds[0]) / 50)
        pen.fillText(data.versions[version].slice(0, 12), x + 8, top + 9);
    } else if (kind === "pause" || kind === "resume") {
      pen.fillStyle = colours["--muted"];
      if (kind === "pause") { pen.fillRect(x - 4, top + 4, 3, 10); pen.fillRect(x + 1, top + 4, 3, 10); }
      else { pen.beginPath(); pen.moveTo(x - 3, top + 4); pen.lineTo(x + 6, top + 9); pen.lineTo(x - 3, top + 14); pen.fill(); }
    } else {
      pen.fillStyle = colours["--vermilion"];
      pen.font = "700 14px system-ui, sans-serif";
      pen.fillText(kind === "abort" ? "×" : "!", x - 4, top + 10);
    }
  };

  // ---- a selected call
  const panel = byId("call");
  const callAt = (x, y) => {
    const number = data.order.findLast((lane) => y >= places[lane]);
    if (number === undefined) return -1;
    const row = Math.floor((y - places[number] - HEAD) / rowHeight);
    let best = -1, near = 12;
    for (const i of lanes[number].calls) {
      if (Math.abs(rowOf[i] - row) > (rowHeight < 8 ? 1 : 0)) continue;
      const x0 = xOf(startOf(i)), x1 = xOf(endOf(i));
      const off = x < x0 ? x0 - x : x > x1 ? x - x1 : 0;
      const far = off + 4 * Math.abs(rowOf[i] - row);
      if (far < near) [best, near] = [i, far];
    }
    return best;
  };
  const marksNear = (x, y) => data.marks.filter((mark) => {
    const top = mark[1] < 0 ? 0 : places[mark[1]], bottom = mark[1] < 0 ? height : places[mark[1]] + HEAD;
    return Math.abs(xOf(mark[byTime ? 3 : 2]) - x) < 9 && y >= top && y <= bottom;
  });
  const link = (text, action) => {
    const button = make("button", text);
    button.type = "button";
    button.addEventListener("click", action);
    return button;
  };
  const showTokens = (i, room) => {
    const held = data.tokens[i];
    room.replaceChildren();
    if (!held) {
      room.append(make("p", calls.sampled[i] ? "The tokens of this call are not in this page." : "It sampled no token.", "muted"));
      return;
    }
    const list = (name, ids, logprobs) => {
      room.append(make("p", name));
      const box = make("div", undefined, "tokens");
      const add = (start, end) => {
        for (let k = start; k < Math.min(end, ids.length); k++) {
          const chip = make("span", String(ids[k]));
          if (logprobs && k < logprobs.length) chip.append(make("small", logprobs[k] === null ? "none" : String(logprobs[k])));
          box.append(chip);
        }
      };
      add(0, 200);
      room.append(box);
      if (ids.length > 200) {
        const more = link("all " + tokenCount(ids.length), () => { add(200, ids.length); more.remove(); });
        room.append(more);
      }
    };
    if (held.prompt) list("sent", held.prompt);
    list(held.logprobs ? "sampled, each with its logprob" : "sampled", held.ids, held.logprobs);
  };
  const select = (i) => {
    selected = i;
    panel.replaceChildren();
    const request = calls.request[i];
    panel.append(make("h3", "call " + calls.id[i] + " on " + data.servers[calls.server[i]]));
    const list = make("dl");
    const row = (name, value) => { list.append(make("dt", name), make("dd", value)); };
    row("request", request < 0 ? "unknown" : data.requests[request]);
    row("events", calls.i0[i] + (calls.i1[i] < 0 ? " (no reply)" : " to " + calls.i1[i]));
    row("time", calls.t0[i] + " s" + (calls.i1[i] < 0 ? "" : " to " + calls.t1[i] + " s"));
    row("got", tokenCount(calls.prompt[i]));
    row("reply", data.texts[calls.text[i]]);
    panel.append(list);
    if (request >= 0) {
      const ends = data.ends[request];
      if (ends) panel.append(make("p", "event " + ends[0] + ":" + data.texts[ends[2]]));
      const own = [];
      for (let k = 0; k < total; k++) if (calls.request[k] === request) own.push(k);
      if (own.length > 1) {
        const links = make("div", undefined, "links");
        for (const k of own.slice(0, 40)) {
          const button = link("call " + calls.id[k], () => { reveal(k); });
          button.setAttribute("aria-pressed", k === i);
          links.append(button);
        }
        panel.append(links);
      }
      if (ends && ends.length > 3) panel.append(make("p", "event " + ends[3] + ": " + data.texts[ends[5]]));
    }
    const room = make("div");
    panel.append(link("tokens", () => showTokens(i, room)), room);
    redraw();
  };
  const reveal = (i) => {
    const [a, b] = [startOf(i), endOf(i)];
    if (b < from || a > to || b - a < (to - from) / 200) {
      const size = Math.max((b - a) * 4, byTime ? 1e-6 : 10);
      move((a + b - size) / 2, (a + b + size) / 2);
    }
    canvas.parentElement.scrollTop = Math.max(0, topOf(i) - 120);
    select(i);
  };

  // ---- pointers, keys and buttons
  const pointers = new Map();
  let moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event.offsetX);
    if (pointers.size === 1) moved = 0;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) return;
    const before = [...pointers.values()];
    pointers.set(event.pointerId, event.offsetX);
    const after = [...pointers.values()];
    const scale = (to - from) / width;
    if (after.length === 1) {
      const by = (before[0] - after[0]) * scale;
      moved += Math.abs(before[0] - after[0]);
      if (moved > 4) move(from + by, to + by);
    } else if (after.length === 2) {
      const spread = (pair) => Math.max(10, Math.abs(pair[0] - pair[1]));
      moved = 99;
      zoom(spread(before) / spread(after), from + (after[0] + after[1]) / 2 * scale);
    }
  });
  const up = (event) => {
    pointers.delete(event.pointerId);
    if (event.type !== "pointerup" || moved > 4) return;
    const marks = marksNear(event.offsetX, event.offsetY);
    if (marks.length) {
      selected = -1;
      panel.replaceChildren(...marks.slice(0, 8).map((mark) => make("p", "event " + mark[2] + ", " + mark[3] + " s: " + mark[4])));
      redraw();
      return;
    }
    const i = callAt(event.offsetX, event.offsetY);
    if (i >= 0) select(i);
  };
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, up);
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
    event.preventDefault();
    zoom(Math.exp((event.deltaY || event.deltaX) * 0.002), from + event.offsetX / width * (to - from));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const step = (to - from) * 0.15;
    const actions = {
      ArrowLeft: () => move(from - step, to - step), ArrowRight: () => move(from + step, to + step),
      "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1.6), "0": () => move(...full()),
    };
    if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
  });
  const axis = (time) => {
    byTime = time;
    byId("by-time").setAttribute("aria-pressed", time);
    byId("by-event").setAttribute("aria-pressed", !time);
    pack();
    [from, to] = full();
    fitCanvas();
    if (data.story.length && total > 200) here();
  };
  byId("by-event").addEventListener("click", () => axis(false));
  byId("by-time").addEventListener("click", () => axis(true));
  byId("in").addEventListener("click", () => zoom(0.5));
  byId("out").addEventListener("click", () => zoom(2));
  byId("all").addEventListener("click", () => move(...full()));
  if (byId("here")) byId("here").addEventListener("click", here);
  byId("find").addEventListener("input", (event) => {
    const wanted = event.target.value.trim();
    panel.replaceChildren();
    if (!wanted) return;
    const exact = data.requests.indexOf(wanted);
    const found = exact >= 0 ? [exact] : [];
    for (let r = 0; r < data.requests.length && found.length < 30; r++)
      if (r !== exact && data.requests[r].includes(wanted)) found.push(r);
    if (!found.length) panel.append(make("p", "no request of this name is drawn", "muted"));
    const links = make("div", undefined, "links");
    for (const r of found) {
      const first = calls.request.indexOf(r);
      if (first >= 0) links.append(link(data.requests[r], () => reveal(first)));
      else links.append(make("span", data.requests[r] + " (no calls)", "muted"));
    }
    panel.append(links);
  });

  // ---- legend
  const drawLegend = () => {
    const legend = byId("legend");
    legend.replaceChildren();
    const entry = (colour, text, sign) => {
      const item = make("li"), box = make("i", sign);
      if (sign) Object.assign(box.style, { color: colour, width: "auto", fontStyle: "normal", fontWeight: "700" });
      else box.style.background = colour;
      item.append(box, text);
      legend.append(item);
    };
    const used = new Set(calls.weights.flatMap((runs) => runs.filter((_, k) => k % 2 === 0)));
    const known = [...used].filter((version) => version >= 0).sort((a, b) => a - b);
    for (const version of known.slice(0, 12)) entry(versionColour(version), data.versions[version].slice(0, 40));
    if (known.length > 12) entry("transparent", "and " + (known.length - 12) + " more versions; colours repeat");
    if (used.has(-1)) entry(colours["--muted"], "weights unknown");
    const kinds = new Set(data.marks.map((mark) => mark[0]));
    if (calls.state.includes(OPEN)) entry(colours["--grid"], "no reply");
    if (calls.state.includes(ABORTED) || kinds.has("abort")) entry(colours["--vermilion"], "aborted", "×");
    if (calls.state.includes(LOST)) entry(colours["--vermilion"], "not received", "∖");
    if (kinds.has("pause")) entry(colours["--muted"], "paused", "‖");
    if (kinds.has("weights")) entry(colours["--muted"], "weight update", "▾");
    if (kinds.has("fault")) entry(colours["--vermilion"], "fault", "!");
  };

  // ---- routes
  const maps = data.maps;
  const drawMaps = () => {
    if (!maps) return;
    const cell = Math.max(11, Math.min(26, Math.floor(420 / Math.max(maps.positions.length, 1)))), gutter = 34, head = 18;
    const highest = Math.max(1, maps.experts - 1,
      ...[maps.expected, maps.observed].flat().flatMap((row) => row ? row.map((ids) => Math.max(...ids)) : []));
    for (const side of ["expected", "observed"]) {
      const board = byId(side), ratio = devicePixelRatio || 1;
      const wide = gutter + maps.positions.length * cell + 2, tall = head + maps.layers.length * cell + 2;
      board.style.width = wide + "px"; board.style.height = tall + "px";
      board.width = wide * ratio; board.height = tall * ratio;
      const ink = board.getContext("2d");
      ink.setTransform(ratio, 0, 0, ratio, 0, 0);
      ink.font = "11px system-ui, sans-serif";
      ink.textBaseline = "middle";
      ink.fillStyle = colours["--muted"];
      maps.layers.forEach((layer, row) => {
        if (cell >= 14 || row % 2 === 0) ink.fillText(String(layer), 4, head + (row + 0.5) * cell);
      });
      const every = Math.ceil(30 / cell);
      maps.positions.forEach((position, column) => {
        ink.fillStyle = colours["--muted"];
        if (column % every === 0) ink.fillText(String(position), gutter + column * cell, head / 2);
        for (let row = 0; row < maps.layers.length; row++) {
          const x = gutter + column * cell, y = head + row * cell;
          const ids = (maps[side][column] || [])[row];
          if (!ids || !ids.length) {
            ink.fillStyle = colours["--grid"];
            ink.fillRect(x + cell / 2 - 1, y + cell / 2 - 1, 2, 2);
            continue;
          }
          const share = Math.min(1, Math.max(0, Math.min(...ids) / highest));
          ink.fillStyle = `hsl(${215 - 185 * share} 60% ${dark.matches ? 30 + 35 * share : 78 - 38 * share}%)`;
          ink.fillRect(x + 0.5, y + 0.5, cell - 1, cell - 1);
          if (side === "observed" && differs(column, row)) {
            ink.strokeStyle = colours["--vermilion"];
            ink.lineWidth = 2;
            ink.strokeRect(x + 1.5, y + 1.5, cell - 3, cell - 3);
          }
        }
      });
      board.onclick = (event) => {
        const column = Math.floor((event.offsetX - gutter) / cell), row = Math.floor((event.offsetY - head) / cell);
        if (column >= 0 && column < maps.positions.length && row >= 0 && row < maps.layers.length) tellCell(column, row);
      };
    }
  };
  const cellOf = (side, column, row) => (maps[side][column] || [])[row];
  const differs = (column, row) => {
    if (!maps.wrong[column]) return false;
    const sorted = (ids) => ids ? JSON.stringify([...ids].sort((a, b) => a - b)) : "";
    return sorted(cellOf("expected", column, row)) !== sorted(cellOf("observed", column, row));
  };
  const tellCell = (column, row) => {
    const text = (side) => { const ids = cellOf(side, column, row); return ids ? "experts " + ids.join(", ") : "no row"; };
    byId("cell").textContent = `position ${maps.positions[column]}, layer ${maps.layers[row]}: expected ${text("expected")}; observed ${text("observed")}`;
  };

  const start = () => { readColours(); drawLegend(); drawMaps(); redraw(); };
  dark.addEventListener("change", start);
  addEventListener("resize", fitCanvas);
  readColours();
  drawLegend();
  drawMaps();
  axis(false);
})();
