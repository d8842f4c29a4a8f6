"use strict";
// Keeps the page of a run fresh. Elements stay where they are and change their text, so that focus, open details and the
// reader's place remain. Only sections that are new move others, and then the page scrolls by as much.

const PAUSE_MS = 2000;
document.documentElement.style.overflowAnchor = "none"; // the script below keeps the place, in every browser

function keepPlace(change) {
  const blocks = [...document.querySelectorAll("header, main h2, main h3, main figure, main table, main p, main details")];
  const shown = blocks.filter((one) => !one.parentElement.closest("details:not([open])")); // others have no true place
  const anchor = shown.find((one) => one.getBoundingClientRect().top > -2) || shown.at(-1); // the first that begins in sight
  const before = anchor?.getBoundingClientRect().top;
  change();
  if (anchor?.isConnected && scrollY > 0) scrollBy({ top: anchor.getBoundingClientRect().top - before, behavior: "instant" });
}

const key = (node) => (node.nodeType === Node.ELEMENT_NODE && node.tagName === "SECTION" ? node.getAttribute("aria-labelledby") : null);

function sync(old, fresh) {
  if (old.isEqualNode(fresh)) return old;
  const same = old.nodeType === fresh.nodeType && old.nodeName === fresh.nodeName;
  if (same && old.matches?.("svg[data-chart]") && old.dataset.chart === fresh.dataset.chart) return old; // its cursor may show
  if (same && old.matches?.("output.reading")) return old;
  if (!same || old.matches?.("svg[data-chart]")) return replace(old, fresh);
  if (old.nodeType !== Node.ELEMENT_NODE) {
    old.data = fresh.data;
    return old;
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  syncChildren(old, fresh);
  return old;
}

function syncChildren(old, fresh) {
  const known = new Map([...old.childNodes].filter(key).map((node) => [key(node), node]));
  let at = old.firstChild;
  for (const node of [...fresh.childNodes]) {
    const match = key(node) ? known.get(key(node)) : at && !key(at) ? at : null;
    if (!match) {
      const added = document.importNode(node, true);
      old.insertBefore(added, at);
      if (added.nodeType === Node.ELEMENT_NODE) addCursors(added); // of the page's own script
      continue;
    }
    while (at && at !== match) at = drop(at);
    at = sync(match, node).nextSibling;
  }
  while (at) at = drop(at);
}

function drop(node) {
  const next = node.nextSibling;
  node.remove();
  return next;
}

function replace(old, fresh) {
  const made = document.importNode(fresh, true);
  const focused = old === document.activeElement;
  old.replaceWith(made);
  if (made.nodeType === Node.ELEMENT_NODE) addCursors(made);
  if (focused) made.focus({ preventScroll: true });
  return made;
}

function update(html) {
  const fresh = new DOMParser().parseFromString(html, "text/html");
  keepPlace(() => {
    document.title = fresh.title;
    when.textContent = `Live; the numbers changed at ${new Date().toLocaleTimeString()}.`;
    for (const name of ["header", "nav", "main"]) sync(document.querySelector(`body > ${name}`), fresh.querySelector(`body > ${name}`));
  });
}

const pause = document.getElementById("watch-pause");
const when = document.getElementById("watch-when");
const end = document.getElementById("watch-end");

function finish(text) {
  keepPlace(() => {
    when.remove();
    pause.parentElement.remove();
    end.textContent = text;
  });
}

async function follow() {
  let tag = "";
  let silent = "";
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    if (pause.checked) continue;
    let answer;
    try {
      answer = await fetch("page", { headers: tag ? { "if-none-match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) update(await answer.text());
    } catch { // the server has ended, or the way to it: a tunnel comes back
      silent = silent || new Date().toLocaleTimeString();
      when.textContent = `The server has not answered since ${silent}. The page stays as it is, and asks again.`;
      continue;
    }
    if (silent && answer.status === 304) when.textContent = "Live; nothing has changed.";
    silent = "";
    tag = answer.headers.get("etag") || "";
    if (answer.headers.get("x-run") === "ended") {
      finish("The run has ended. The page stays as it is.");
      return;
    }
  }
}

follow();
