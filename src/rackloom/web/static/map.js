// Keys, the chosen GPU, and whether the page is still fed. What is drawn comes from the server, by htmx.
"use strict";

const QUIET_SECONDS = 15; // the server speaks every five seconds, whether anything changed or not

const live = document.getElementById("live");
const chain = document.getElementById("chain");
let heard = Date.now();
let here = null; // id of the one GPU that Tab reaches
let chosen = null; // id of the GPU whose chain is shown

const cells = () => [...document.querySelectorAll("rect[role=gridcell]")];

function say(state, words) {
  if (live.dataset.state === state && live.textContent === words) return;
  live.dataset.state = state;
  live.textContent = words;
}

function heardOf() {
  heard = Date.now();
  say("live", "live");
}

function lost() {
  say("lost", `not live since ${new Date(heard).toISOString().slice(11, 19)} UTC`);
}

// A rack that was drawn again has forgotten which GPU is here and which is chosen.
function mark() {
  document.querySelectorAll('rect[tabindex="0"]').forEach((old) => old.setAttribute("tabindex", "-1"));
  document.querySelectorAll("rect[aria-selected]").forEach((old) => old.removeAttribute("aria-selected"));
  const at = document.getElementById(here) || document.querySelector("rect[role=gridcell]");
  if (at) at.setAttribute("tabindex", "0");
  document.getElementById(chosen)?.setAttribute("aria-selected", "true");
}

function show() {
  const [rack, tray, gpu] = chosen.split("-");
  htmx.ajax("GET", `/map/gpu/${rack}/${tray}/${gpu}?by=${chain.dataset.by}`, { target: "#chain", swap: "innerHTML" });
}

function go(cell) {
  if (!cell) return;
  here = cell.id;
  mark();
  cell.focus();
}

function choose(cell) {
  chosen = cell.id;
  go(cell);
  show();
}

function near(cell, key) {
  const tray = cell.parentElement;
  const column = [...tray.querySelectorAll("rect")].indexOf(cell);
  const rows = [...cell.ownerSVGElement.querySelectorAll("g[role=row]")];
  const inRow = (row) => row && (row.querySelectorAll("rect")[column] || row.querySelector("rect"));
  const beside = (step) => {
    const all = cells();
    return all[all.indexOf(cell) + step];
  };
  const rack = (step) => {
    const racks = [...document.querySelectorAll(".rack")];
    const next = racks[racks.indexOf(cell.closest(".rack")) + step];
    return next && (document.getElementById(cell.id.replace(/^[^-]+/, next.id)) || next.querySelector("rect[role=gridcell]"));
  };
  const moves = {
    ArrowLeft: () => beside(-1),
    ArrowRight: () => beside(1),
    ArrowUp: () => inRow(rows[rows.indexOf(tray) - 1]),
    ArrowDown: () => inRow(rows[rows.indexOf(tray) + 1]),
    PageUp: () => rack(-1),
    PageDown: () => rack(1),
    Home: () => cells()[0],
    End: () => cells().at(-1),
  };
  return moves[key] && (() => go(moves[key]()));
}

document.addEventListener("keydown", (event) => {
  const cell = event.target.closest?.("rect[role=gridcell]");
  if (!cell || event.altKey || event.ctrlKey || event.metaKey) return;
  const move = event.key === "Enter" || event.key === " " ? () => choose(cell) : near(cell, event.key);
  if (!move) return;
  event.preventDefault();
  move();
});

// What a finding or an operation is about: a GPU is chosen, a rack is walked to.
function follow(link, event) {
  const there = document.getElementById(link.dataset.shows);
  if (!there) return;
  event.preventDefault();
  if (there.matches("rect")) choose(there);
  else go(there.querySelector("rect[role=gridcell]"));
}

document.addEventListener("click", (event) => {
  const cell = event.target.closest?.("rect[role=gridcell]");
  const link = event.target.closest?.("a[data-shows]");
  if (cell) choose(cell);
  if (link) follow(link, event);
});

document.addEventListener("htmx:sse:after:connection", heardOf);
document.addEventListener("htmx:sse:error", (event) => {
  lost();
  if (event.detail?.status === 401) window.location.assign("/map/login"); // the token has ended
});
document.addEventListener("htmx:sse:close", lost);
document.addEventListener("htmx:sse:after:message", () => {
  heardOf();
  mark();
  if (chosen) show();
});
setInterval(() => {
  if (Date.now() - heard > QUIET_SECONDS * 1000 && live.dataset.state === "live") lost();
}, 1000);
mark();
