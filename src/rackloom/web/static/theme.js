// The theme that the viewer chose. It runs before the page is drawn, so that no other theme is seen first.
"use strict";

const MEDIA_OF_THEME = { system: "(prefers-color-scheme: dark)", light: "not all", dark: "all" };
const THEME_KEY = "rackloom-theme";

function storedTheme() {
  try {
    const stored = localStorage.getItem(THEME_KEY);
    return stored in MEDIA_OF_THEME ? stored : "system";
  } catch {
    return "system"; // the browser keeps nothing for this site
  }
}

function setTheme(theme) {
  document.getElementById("dark").media = MEDIA_OF_THEME[theme];
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem(THEME_KEY, theme);
  } catch {
    // It counts for this page alone.
  }
}

setTheme(storedTheme());
window.addEventListener("storage", (event) => event.key === THEME_KEY && setTheme(storedTheme()));
