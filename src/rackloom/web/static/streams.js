// Which pages of this browser follow the site. A browser opens six connections to a server without HTTP/2, for all
// of its tabs and windows together, and a stream keeps one. So hidden pages hold none, and of those that are seen
// at most MOST_FOLLOWING do: those that were used last. A page that gave its stream up says so, and takes one again,
// with what it missed, when somebody uses it.
"use strict";

const MOST_FOLLOWING = 4;
const me = `${Date.now()}-${Math.random()}`;
const pages = new BroadcastChannel("rackloom-map");
const first = document.getElementById("stream"); // none on a page of the past
const since = new Set(); // pages that began to follow after this one
let stream = first;
let connection = null; // of the stream, once it is open
let position = null; // the last event that came

function connectAgain() {
  const address = new URL(first.getAttribute("hx-sse:connect"), location.href);
  if (position) address.searchParams.set("after", position);
  stream = first.cloneNode();
  stream.setAttribute("hx-sse:connect", address.pathname + address.search);
  document.body.append(stream);
  htmx.process(stream);
}

function follow() {
  if (stream) return;
  showState("joining", "connecting");
  lost.hidden = true;
  connectAgain();
  announce();
}

// Others give way. Of two that begin at the same moment each counts the other.
function announce() {
  since.clear();
  pages.postMessage({ page: me, follows: true });
}

function pause() {
  if (!stream) return;
  stream.remove();
  connection?.abortController.abort();
  connection?.reader?.cancel();
  stream = connection = null;
  pages.postMessage({ page: me, follows: false });
  const at = `${new Date(lastEventAt).toISOString().slice(11, 19)} UTC`;
  showState("paused", "paused");
  lost.textContent = `Paused at ${at}: ${MOST_FOLLOWING} other pages of this browser follow the site. Click here, or press a key, and this one does.`;
  lost.hidden = false;
}

if (first) {
  if (document.hidden) {
    // Opened in the background: htmx, which comes to it later, finds nothing to connect.
    first.remove();
    stream = null;
    showState("paused", "paused");
  } else {
    announce();
  }

  pages.addEventListener("message", ({ data }) => {
    if (!data.follows) since.delete(data.page);
    else since.add(data.page);
    if (stream && since.size >= MOST_FOLLOWING) pause();
  });
  document.addEventListener("htmx:sse:after:connection", (event) => (connection = event.detail.connection));
  document.addEventListener("htmx:sse:after:message", (event) => (position = event.detail.message.id || position));
  document.addEventListener("visibilitychange", () => (document.hidden ? pause() : follow()));
  window.addEventListener("pagehide", () => pages.postMessage({ page: me, follows: false }));
  for (const use of ["focus", "pointerdown", "keydown"]) window.addEventListener(use, () => document.hidden || follow());
}
