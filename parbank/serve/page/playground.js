"use strict";
// Text reaches the page as text alone: every element is made here, and no string is ever read as HTML.

const LEVELS = [1, 2, 4, 7, 11]; // bits from which a token has the next colour and underline
const PAGE_TOKENS = 2000; // tokens of a measured text shown together: a browser is slow with a million elements
const TYPING_PAUSE_MS = 500;
const LONG_PASTE = 20000; // characters
const KEPT_TEXT = 200000; // characters of a text that survive a reload

const find = (id) => document.getElementById(id);
const number = (value, digits) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const count = (value) => number(value, 0);
const percent = (value) => (value >= 0.0995 ? number(100 * value, 1) : number(100 * value, 2)) + "%";
const plural = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;

function make(tag, properties = {}, ...children) {
  const { className, text, ...attributes } = properties;
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Characters that a browser hides, or that reorder the text around them, appear by their code.
const HIDDEN = "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb\\u{e0000}-\\u{e007f}]";
const PARTS = new RegExp(`(\\n|${HIDDEN})`, "u");
const IS_HIDDEN = new RegExp(`^${HIDDEN}$`, "u");
const code = (sign) => "\\u" + sign.codePointAt(0).toString(16).padStart(4, "0");

// In a table or a sentence (oneLine) a token also shows the spaces at its ends.
function fill(element, text, { oneLine = false } = {}) {
  const [, before, inside, after] = oneLine ? text.match(/^( *)([^]*?)( *)$/) : ["", "", text, ""];
  if (before) element.append(make("span", { className: "sign", text: "␣".repeat(before.length) }));
  for (const part of inside.split(PARTS)) {
    if (part === "\n") element.append(make("span", { className: "sign", text: "⏎" }), oneLine ? "" : "\n");
    else if (IS_HIDDEN.test(part)) element.append(make("span", { className: "hidden-sign", text: code(part) }));
    else if (part) element.append(part);
  }
  if (after) element.append(make("span", { className: "sign", text: "␣".repeat(after.length) }));
  return element;
}

// A model's name is foreign text: its own direction of writing stays inside it. As plain text, for labels and the title.
const visible = (text) => text.replace(new RegExp(HIDDEN, "gu"), code);
const nameOf = (model) => fill(make("bdi"), model.name);

function spoken(text) {
  const named = { " ": "space", "\n": "newline", "\t": "tab" };
  if (/^\s+$/.test(text)) return [...text].map((sign) => named[sign] || code(sign)).join(" ");
  return visible(text.replace(/\n/g, " newline ").trim());
}

const level = (bits) => LEVELS.filter((from) => bits >= from).length;

// ---- requests ----

async function* stream(path, body, signal) {
  const answer = await fetch(path, {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal,
  });
  if (!answer.ok) throw await readError(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const item = JSON.parse(line);
      if (item.error) throw new Error(item.error);
      yield item;
    }
  }
}

async function readError(answer) {
  const found = await answer.json().catch(() => ({}));
  return new Error(found.error || `The server answered ${answer.status} ${answer.statusText}; try again.`);
}

const describe = (error) => (error instanceof TypeError ? "The server does not answer; start it again." : error.message);

// One group of requests: a new one ends the one before.
class Work {
  constructor(status, stop) {
    this.status = status;
    this.stop = stop;
    this.control = null;
    stop.addEventListener("click", () => this.cancel());
  }
  begin() {
    this.control?.abort();
    this.control = new AbortController();
    this.stop.disabled = false;
    return this.control.signal;
  }
  end(signal, text, bad = false) {
    if (this.control?.signal !== signal) return; // a newer request has taken over
    if (document.activeElement === this.stop) this.stop.form.querySelector(".main").focus();
    this.stop.disabled = true;
    this.say(text, bad);
  }
  say(text, bad = false) {
    this.status.replaceChildren(...[text].flat());
    this.status.classList.toggle("bad", bad);
  }
  cancel() {
    this.control?.abort();
  }
}

// ---- tokens: a list that has one place in the order of focus; arrow keys choose, and the choice is explained ----

class TokenList {
  constructor(label, explain) {
    this.box = make("div", { className: "tokens", role: "listbox", tabindex: "0", "aria-label": label, "aria-orientation": "horizontal" });
    this.id = TokenList.next = (TokenList.next || 0) + 1;
    this.explain = explain;
    this.clear();
    this.box.addEventListener("click", (event) => this.choose(this.indexOf(event.target)));
    this.box.addEventListener("pointerover", (event) => {
      const index = this.indexOf(event.target);
      if (index >= 0) this.explain(this.items[index], index);
    });
    this.box.addEventListener("pointerleave", () => this.explain(this.items[this.chosen], this.chosen));
    this.box.addEventListener("keydown", (event) => {
      const last = this.items.length - 1;
      const to = { ArrowLeft: this.chosen - 1, ArrowRight: this.chosen + 1, ArrowUp: this.chosen - 10, ArrowDown: this.chosen + 10, Home: 0, End: last }[event.key];
      if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      this.choose(Math.max(0, Math.min(last, to)));
    });
  }
  clear() {
    this.items = [];
    this.chosen = -1;
    this.box.replaceChildren();
    this.box.removeAttribute("aria-activedescendant");
  }
  add(item) {
    this.items.push(item);
    const token = make("span", {
      className: `token l${level(item.bits)}`, role: "option", id: `token-${this.id}-${this.items.length - 1}`, "aria-selected": "false",
      "aria-label": `${spoken(item.text)}, ${number(item.bits, 1)} bits`,
    });
    return fill(token, item.text);
  }
  indexOf(target) {
    const token = target.closest(".token");
    return token ? Number(token.id.split("-")[2]) : -1;
  }
  choose(index) {
    if (!(index in this.items)) return;
    const before = this.box.children[this.chosen];
    before?.classList.remove("chosen");
    before?.setAttribute("aria-selected", "false");
    this.chosen = index;
    const token = this.box.children[index];
    token.classList.add("chosen");
    token.setAttribute("aria-selected", "true");
    this.box.setAttribute("aria-activedescendant", token.id);
    const top = token.offsetTop - this.box.offsetTop;
    if (top < this.box.scrollTop || top + token.offsetHeight > this.box.scrollTop + this.box.clientHeight) this.box.scrollTop = top - 24;
    this.explain(this.items[index], index);
  }
}

const quoted = (text) => fill(make("span", { className: "quoted" }), text, { oneLine: true });

// ---- write ----

class Writer {
  constructor(model, index) {
    this.index = index;
    this.before = make("p", { className: "before" });
    this.list = new TokenList(`Tokens written by ${visible(model.name)}. Arrow keys choose one.`, (item) => this.explain(item));
    this.detail = make("div", { className: "detail tall" });
    this.plain = make("pre");
    const details = make("details", {}, make("summary", {}, "As plain text, by ", nameOf(model)), this.plain);
    this.column = make("article", {}, make("h3", {}, nameOf(model)), this.before, this.list.box, this.detail, details);
    this.clear("");
    this.before.textContent = "Nothing written yet.";
  }
  clear(prompt) {
    this.prompt = prompt;
    this.raw = [];
    this.items = [];
    this.last = null;
    this.waiting = 0; // bits of tokens that are not shown yet
    this.list.clear();
    this.detail.replaceChildren(make("p", { className: "note", text: "Choose a token to see what else could have come, and with which probability." }));
    const end = prompt.slice(-48);
    this.before.replaceChildren();
    fill(this.before, prompt ? (end.length < prompt.length ? "…" : "") + end : "a new document", { oneLine: true });
    this.plain.textContent = "";
  }
  // Tokens that hold parts of one character are shown together, when the character is whole.
  take(item) {
    this.raw.push(item);
    if (item.end) {
      if (item.text) this.place({ ...this.last, text: item.text, bits: this.waiting });
      return;
    }
    this.last = item;
    this.waiting -= Math.log2(Math.max(item.probability, Number.MIN_VALUE));
    if (!item.text) return;
    this.place({ ...item, bits: this.waiting });
    this.waiting = 0;
  }
  place(item) {
    this.items.push(item);
    this.list.box.append(this.list.add(item));
    this.plain.append(item.text);
    if (this.list.chosen < 0) this.explain(item);
  }
  explain(item) {
    if (!item) item = this.items.at(-1);
    if (!item) return;
    const rows = item.likeliest.map((other) => this.row(other, item));
    if (!item.likeliest.some((other) => other.token === item.token)) rows.push(this.row(item, item));
    const head = ["token", "probability", "drawn with", ""].map((name, place) =>
      make("th", { scope: "col", className: place === 1 || place === 2 ? "n" : "" }, name || make("span", { className: "hidden-text", text: "take it" })));
    const caption = make("caption", {}, quoted(item.text), `: ${number(item.bits, 2)} bits. The likeliest at its place:`);
    this.detail.replaceChildren(make("table", {}, caption, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows)));
    this.shown = item;
  }
  row(other, item) {
    const taken = other.token === item.token;
    const name = make("th", { scope: "row" });
    if (other.text === null) name.append(make("em", { text: "end of the text" }));
    else fill(name, other.text, { oneLine: true });
    const last = make("td");
    if (taken) last.append("drawn");
    else if (other.take) {
      const take = make("button", { type: "button", text: "Take", "aria-label": `Continue with ${spoken(other.take)} instead` });
      take.addEventListener("click", () => this.branch(item, other));
      last.append(take);
    }
    return make("tr", taken ? { className: "taken" } : {}, name, make("td", { className: "n", text: percent(other.probability) }), make("td", { className: "n", text: other.chance ? percent(other.chance) : "never" }), last);
  }
  branch(item, other) {
    const before = this.items.slice(0, this.items.indexOf(item)).map((one) => one.text).join("");
    find("prompt").value = this.prompt + before + other.take;
    write();
    find("prompt").focus();
  }
}

const writers = [];
let writing;

async function write() {
  if (!find("write").reportValidity()) return;
  const settings = {
    prompt: find("prompt").value, tokens: Number(find("tokens").value), seed: Number(find("seed").value),
    temperature: Number(find("temperature").value), top_p: Number(find("top-p").value),
  };
  const signal = writing.begin();
  const shown = writers.filter((writer) => !writer.column.hidden);
  writing.say("Writing.");
  for (const writer of shown) writer.clear(settings.prompt);
  const ends = await Promise.all(shown.map((writer) => writeOne(writer, settings, signal)));
  const bad = ends.some((end) => end.bad);
  const said = ends.flatMap((end, place) => (shown.length > 1 ? [nameOf(models[shown[place].index]), `: ${end.text} `] : [end.text]));
  writing.end(signal, said, bad);
  save();
}

async function writeOne(writer, settings, signal) {
  try {
    for await (const item of stream("api/continue", { model: writer.index, ...settings }, signal)) {
      if (signal.aborted) break;
      if (item.reading) {
        writing.say("Reading the text before it writes.");
        continue;
      }
      if (!writer.raw.length) writing.say("Writing.");
      writer.take(item);
      if (item.end) {
        const speed = `${plural(item.tokens, "token")} in ${number(item.seconds, 1)} s, ${count(item.tokens / Math.max(item.seconds, 1e-9))} tokens/s`;
        return { text: item.end === "document" ? `${speed}; the model ended the document.` : `${speed}.` };
      }
    }
    return { text: signal.aborted ? `Stopped after ${plural(writer.raw.length, "token")}.` : "The server has ended.", bad: !signal.aborted };
  } catch (error) {
    if (signal.aborted) return { text: `Stopped after ${plural(writer.raw.length, "token")}.` };
    return { text: describe(error), bad: true };
  }
}

// ---- measure ----

class Meter {
  constructor(model, index) {
    this.index = index;
    this.list = new TokenList(`Tokens as ${visible(model.name)} reads them. Arrow keys choose one.`, (item, place) => this.explain(item, place));
    this.detail = make("p", { className: "detail" });
    this.previous = make("button", { type: "button", text: "Previous", "aria-label": `Previous tokens, ${visible(model.name)}` });
    this.next = make("button", { type: "button", text: "Next", "aria-label": `Next tokens, ${visible(model.name)}` });
    this.place = make("span");
    this.pager = make("div", { className: "pager" }, this.previous, this.next, this.place);
    this.previous.addEventListener("click", () => this.show(this.page - 1));
    this.next.addEventListener("click", () => this.show(this.page + 1));
    this.facts = make("p", { className: "facts" });
    this.column = make("article", {}, make("h3", {}, nameOf(model)), this.facts, this.list.box, this.pager, this.detail);
    this.clear();
  }
  clear() {
    this.pieces = [];
    this.page = 0;
    this.total = 0;
    this.facts.textContent = "Nothing measured yet.";
    this.list.clear();
    this.turn();
    this.explain();
  }
  take(item) {
    if (item.tokens) this.total = item.tokens;
    if (item.pieces) {
      const from = this.pieces.length;
      for (const [text, bits, tokens] of item.pieces) this.pieces.push({ text, bits, tokens });
      const room = (this.page + 1) * PAGE_TOKENS;
      if (from < room) this.append(from, Math.min(room, this.pieces.length));
      this.facts.textContent = `${count(item.done)} of ${plural(this.total, "token")} measured.`;
      this.turn();
    }
    if (item.score) this.facts.textContent = `${number(item.score.bpb, 4)} bits per byte: ${count(item.score.bits)} bits over ${plural(item.score.bytes, "byte")}, ${plural(item.score.tokens, "token")}.`;
  }
  append(from, to) {
    const made = document.createDocumentFragment();
    for (const piece of this.pieces.slice(from, to)) made.append(this.list.add(piece));
    this.list.box.append(made);
  }
  show(page) {
    this.page = page;
    this.list.clear();
    this.append(page * PAGE_TOKENS, Math.min((page + 1) * PAGE_TOKENS, this.pieces.length));
    this.list.box.scrollTop = 0;
    this.turn();
    this.explain();
  }
  turn() {
    const last = Math.max(0, Math.ceil(this.pieces.length / PAGE_TOKENS) - 1);
    this.pager.hidden = last === 0;
    const from = this.page * PAGE_TOKENS;
    this.place.textContent = `Pieces ${count(from + 1)} to ${count(Math.min(from + PAGE_TOKENS, this.pieces.length))} of ${count(this.pieces.length)}`;
    for (const [button, off] of [[this.previous, this.page === 0], [this.next, this.page >= last]]) {
      if (off && document.activeElement === button) (button === this.next ? this.previous : this.next).focus();
      button.disabled = off;
    }
  }
  explain(item) {
    if (!item) {
      this.detail.replaceChildren(make("span", { className: "note", text: "Point at a token, or choose one by arrow keys, to see its bits." }));
      return;
    }
    const parts = item.tokens > 1 ? `, ${plural(item.tokens, "token")}` : "";
    this.detail.replaceChildren(quoted(item.text), `: ${number(item.bits, 2)} bits, probability ${percent(2 ** -item.bits)}${parts}`);
  }
}

const meters = [];
let measuring;

function showResult(scores, compressors) {
  const rows = [];
  const all = [...scores.map((score) => [nameOf(score.model), score.bpb, true]), ...Object.entries(compressors.bpb || {}).map(([name, bpb]) => [name, bpb, false])];
  const most = Math.max(...all.map(([, bpb]) => bpb));
  for (const [name, bpb, own] of all) {
    const bar = make("div", { className: "meter" });
    bar.style.width = `${(100 * bpb) / most}%`;
    rows.push(make("tr", { className: own ? "own" : "other" }, make("th", { scope: "row" }, name), make("td", { className: "n", text: number(bpb, 4) }), make("td", { className: "n", text: count((bpb * compressors.bytes) / 8) }), make("td", {}, bar)));
  }
  find("result").tBodies[0].replaceChildren(...rows);
  find("result-note").textContent = `The text has ${plural(compressors.bytes, "byte")}. zlib, xz and zstd include their headers, which weigh on a short text; a model's own file does not count here.`;
  find("result-region").hidden = !rows.length;
}

async function measure() {
  const text = find("text").value;
  const signal = measuring.begin();
  const bytes = new TextEncoder().encode(text).length;
  if (!text) return measuring.end(signal, "There is no text to measure; type or paste some.", true);
  if (bytes > limits.text_bytes) return measuring.end(signal, `The text has ${count(bytes)} bytes, and ${count(limits.text_bytes)} are the most here. parbank eval measures longer texts.`, true);
  const shown = meters.filter((meter) => !meter.column.hidden);
  const compressors = { bytes };
  const scores = shown.map((meter) => ({ model: models[meter.index] }));
  const ready = () => scores.filter((score) => score.bpb !== undefined);
  find("result-region").hidden = true;
  for (const meter of shown) meter.clear();
  measuring.say("Measuring.");
  const began = performance.now();
  try {
    await Promise.all([
      compress(text, signal).then((bpb) => { compressors.bpb = bpb; showResult(ready(), compressors); }),
      ...shown.map(async (meter, place) => {
        for await (const item of stream("api/bits", { model: meter.index, text }, signal)) {
          if (signal.aborted) return;
          meter.take(item);
          if (item.score) { scores[place].bpb = item.score.bpb; showResult(ready(), compressors); }
        }
        if (scores[place].bpb === undefined) throw new Error("The server has ended.");
      }),
    ]);
    measuring.end(signal, signal.aborted ? "Stopped." : `Measured in ${number((performance.now() - began) / 1000, 1)} s.`);
  } catch (error) {
    measuring.end(signal, signal.aborted ? "Stopped." : describe(error), !signal.aborted);
    if (!signal.aborted) measuring.cancel(); // the requests for other models
  }
}

async function compress(text, signal) {
  const answer = await fetch("api/compressors", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ text }), signal });
  if (!answer.ok) throw await readError(answer);
  return answer.json();
}

// ---- the page: what it keeps over a reload, and its controls ----

const KEPT = ["prompt", "tokens", "seed", "temperature", "top-p", "text"];
let models = [];
let limits = {};

function save() {
  const kept = Object.fromEntries(KEPT.map((id) => [id, find(id).value.slice(0, KEPT_TEXT)]));
  kept.writers = writers.map((writer) => ({ name: models[writer.index].name, prompt: writer.prompt, items: writer.raw, hidden: writer.column.hidden }));
  try {
    sessionStorage.setItem("playground", JSON.stringify(kept));
  } catch { /* more than the browser keeps: the page then begins anew */ }
}

function restore() {
  let kept;
  try {
    kept = JSON.parse(sessionStorage.getItem("playground"));
  } catch { /* not ours */ }
  if (!kept) return;
  for (const id of KEPT) if (typeof kept[id] === "string") find(id).value = kept[id];
  for (const writer of writers) {
    const old = kept.writers?.[writer.index];
    if (old?.name !== models[writer.index].name) continue;
    if (models.length > 1) setHidden(writer.index, old.hidden);
    if (!old.items.length) continue;
    writer.clear(old.prompt);
    for (const item of old.items) writer.take(item);
    if (!old.items.at(-1).end) writing.say("Stopped when the page was left.");
  }
}

function setHidden(index, hidden) {
  writers[index].column.hidden = meters[index].column.hidden = hidden;
  find(`model-${index}`).checked = !hidden;
}

function showModels() {
  const facts = (model) => [
    model.recipe && `recipe ${model.recipe}`, model.bytes && `${count(model.bytes)} bytes`, `${count(model.parameters)} parameters`,
    `vocabulary ${count(model.vocabulary)}`, `window ${plural(model.context, "token")}`,
  ].filter(Boolean).join(", ");
  models.forEach((model, index) => {
    writers.push(new Writer(model, index));
    meters.push(new Meter(model, index));
    find("write-columns").append(writers[index].column);
    find("measure-columns").append(meters[index].column);
    const box = make("input", { type: "checkbox", id: `model-${index}` });
    box.checked = true;
    box.addEventListener("change", () => {
      const others = models.some((_, other) => other !== index && find(`model-${other}`).checked);
      if (!box.checked && !others) box.checked = true; // the last one stays
      setHidden(index, !box.checked);
    });
    find("models").append(make("label", { className: "check" }, box, make("span", {}, nameOf(model), make("small", { text: ` ${facts(model)}` }))));
  });
  find("models").hidden = models.length < 2;
  if (models.length === 1) find("about").replaceChildren(nameOf(models[0]), `: ${facts(models[0])}.`);
  else find("about").textContent = `${models.length} models, side by side.`;
  document.title = `${models.map((model) => visible(model.name)).join(", ")}: parbank playground`;
  find("tokens").max = limits.tokens;
  find("measure-limit").textContent = `At most ${count(limits.text_bytes)} bytes.`;
}

// Browsers insert a long paste line by line, for minutes. A change of the value takes a second; it cannot be undone.
function pasteQuickly(event) {
  const pasted = event.clipboardData?.getData("text/plain") || "";
  if (pasted.length < LONG_PASTE) return;
  event.preventDefault();
  const box = event.target;
  box.setRangeText(pasted, box.selectionStart, box.selectionEnd, "end");
  box.dispatchEvent(new Event("input", { bubbles: true }));
}

function setUp() {
  writing = new Work(find("write-status"), find("write-stop"));
  measuring = new Work(find("measure-status"), find("measure-stop"));
  let pause;
  find("write").addEventListener("submit", (event) => { event.preventDefault(); write(); });
  find("measure").addEventListener("submit", (event) => { event.preventDefault(); measure(); });
  find("prompt").addEventListener("input", () => {
    clearTimeout(pause);
    if (find("while-typing").checked) pause = setTimeout(write, TYPING_PAUSE_MS);
  });
  for (const [id, start, work] of [["prompt", write, writing], ["text", measure, measuring]]) {
    find(id).addEventListener("paste", pasteQuickly);
    find(id).addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); start(); }
    });
    find(id).closest("section").addEventListener("keydown", (event) => { if (event.key === "Escape") work.cancel(); });
  }
  for (const id of ["temperature", "top-p"]) {
    const show = () => { find(`${id}-value`).textContent = Number(find(id).value).toFixed(2); };
    find(id).addEventListener("input", show);
    show();
  }
  for (const legend of document.querySelectorAll(".legend")) {
    legend.append(make("span", { text: "Bits of a token:" }), ...[0, ...LEVELS].map((from, place) =>
      make("span", { className: `token l${place}`, text: place < LEVELS.length ? `${from} to ${LEVELS[place]}` : `${from} and more` })));
  }
  addEventListener("pagehide", save);
}

async function start() {
  setUp();
  find("about").textContent = "Loading the list of models.";
  try {
    const answer = await fetch("api/models");
    if (!answer.ok) throw await readError(answer);
    ({ models, limits } = await answer.json());
    showModels();
    restore();
    for (const id of ["temperature", "top-p"]) find(id).dispatchEvent(new Event("input"));
    document.body.dataset.ready = "yes";
  } catch (error) {
    find("about").textContent = describe(error);
    find("about").classList.add("bad");
  }
}

start();
