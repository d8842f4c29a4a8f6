"use strict";
// A cursor on every chart and in the shaded text: by pointer, or by arrow keys when it has the focus. Without it the page is
// complete.
function addCursor(chart) {
  const { x, series } = JSON.parse(chart.dataset.chart);
  const [low, high, left, right, log] = x.frame;
  const scale = (v) => (log ? Math.log2(1 + v) : v);
  const across = (v) => left + ((scale(v) - scale(low)) / (scale(high) - scale(low))) * (right - left);
  const places = [...new Set(series.flatMap((s) => s.points.map((p) => p[0])))].sort((a, b) => a - b);
  const cursor = chart.querySelector(".cursor");
  const reading = chart.parentElement.querySelector(".reading");
  const form = (v) => v.toLocaleString("en", { maximumSignificantDigits: 6 });
  const nearest = (list, key, at) =>
    list.reduce((best, one) => (Math.abs(key(one) - at) < Math.abs(key(best) - at) ? one : best));
  let now = -1;
  const show = (index) => {
    now = Math.max(0, Math.min(places.length - 1, index));
    const at = across(places[now]);
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    cursor.removeAttribute("hidden");
    const values = series.map((s) => {
      const p = nearest(s.points, (p) => across(p[0]), at);
      return Math.abs(across(p[0]) - at) < 3 ? `${series.length > 1 ? s.name + " " : ""}${form(p[1])}` : null;
    });
    reading.textContent = `${form(places[now])} ${x.label}: ${values.filter(Boolean).join(", ")}`;
  };
  const hide = () => {
    cursor.setAttribute("hidden", "");
    reading.textContent = "";
  };
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
    show(places.indexOf(nearest(places, across, at)));
  });
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("focus", () => chart.matches(":focus-visible") && show(now < 0 ? places.length - 1 : now));
  chart.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -places.length, End: places.length }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    show(now + step);
  });
}
function addReader(text) {
  const tokens = [...text.querySelectorAll("[data-bits]")];
  const reading = text.parentElement.querySelector(".reading");
  let now = -1;
  const show = (index) => {
    tokens[now]?.classList.remove("chosen");
    now = Math.max(0, Math.min(tokens.length - 1, index));
    tokens[now].classList.add("chosen");
    const word = document.createElement("bdi");
    word.textContent = JSON.stringify(tokens[now].textContent);
    reading.replaceChildren(word, `: ${tokens[now].dataset.bits} bits`);
  };
  text.addEventListener("pointerover", (event) => {
    const token = event.target.closest("[data-bits]");
    if (token) show(tokens.indexOf(token));
  });
  text.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -tokens.length, End: tokens.length }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    show(now + step);
    tokens[now].scrollIntoView({ block: "nearest" });
  });
}
function addCursors(root) {
  const all = (selector) => [...(root.matches?.(selector) ? [root] : []), ...root.querySelectorAll(selector)];
  all("svg[data-chart]").forEach(addCursor);
  all(".surprise").forEach(addReader);
}
addCursors(document);
