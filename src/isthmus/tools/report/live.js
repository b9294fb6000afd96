"use strict";
// Asks for the page again, and replaces the sections that differ. Scroll positions, open details, zoom, focus and
// selected text stay.
(() => {
  const interval_ms = 2000;
  const timeout_ms = 30000;
  const state = document.getElementById("live");
  const sections = (page) => [...page.querySelectorAll("nav, section")];
  const key = (section) => section.id || section.localName;
  // As the server has sent them: the elements of this page change, for example when details are opened.
  let served = new Map(sections(document).map((section) => [key(section), section.outerHTML]));
  let tag = null;
  document.documentElement.style.overflowAnchor = "none"; // keepPosition does it

  function show(text, isError) {
    if (state.textContent !== text) state.textContent = text;
    state.className = isError ? "error" : "ok";
  }

  const summaries = (section) => {
    const counts = {};
    return [...section.querySelectorAll("summary")].map((summary) => {
      const text = summary.textContent;
      counts[text] = (counts[text] ?? 0) + 1;
      return [`${text} ${counts[text]}`, summary];
    });
  };

  function replace(before, after) {
    const old = new Map(summaries(before));
    let focused = null;
    for (const [name, summary] of summaries(after)) {
      const previous = old.get(name);
      if (previous) summary.parentElement.open = previous.parentElement.open;
      if (previous && previous === document.activeElement) focused = summary;
    }
    const boxes = [...before.querySelectorAll(".scroll, pre")].map((box) => [box.scrollLeft, box.scrollTop]);
    const navigation = [before.scrollLeft, before.scrollTop];
    before.replaceWith(after);
    [...after.querySelectorAll(".scroll, pre")].forEach((box, index) => {
      if (boxes[index]) [box.scrollLeft, box.scrollTop] = boxes[index];
    });
    [after.scrollLeft, after.scrollTop] = navigation;
    focused?.focus({ preventScroll: true });
  }

  // With the same plots only their values and captions are new.
  function updateCurves(before, after, data) {
    const [old, fresh] = [[...before.children], [...after.children]];
    if (!window.reportCurves.fits(data) || old.length !== fresh.length) {
      replace(before, after);
      return window.reportCurves.redraw(data);
    }
    old.forEach((child, index) => {
      if (!child.matches(".panels")) {
        if (child.outerHTML !== fresh[index].outerHTML) child.replaceWith(fresh[index]);
        return;
      }
      const figures = [...fresh[index].children];
      [...child.children].forEach((figure, number) => {
        figure.querySelector("figcaption").replaceWith(figures[number].querySelector("figcaption"));
        figure.querySelector(".plot").setAttribute("aria-label", figures[number].querySelector(".plot").getAttribute("aria-label"));
      });
    });
    window.reportCurves.update(data);
  }

  // Whether somebody selects text there.
  function isSelected(section) {
    const selection = getSelection();
    return !selection.isCollapsed && section.contains(selection.anchorNode);
  }

  // Returns whether all of the newer page is shown now.
  function update(newer) {
    const data = newer.getElementById("curves-data");
    let previous = null;
    let isComplete = true;
    const shown = new Map();
    for (const fresh of sections(newer)) {
      const name = key(fresh);
      const html = fresh.outerHTML;
      const old = sections(document).find((section) => key(section) === name);
      if (!old) {
        previous.after(fresh);
        if (name === "curves") window.reportCurves.redraw(JSON.parse(data.textContent));
        previous = fresh;
      } else if (html === served.get(name)) {
        previous = old;
      } else if (isSelected(old)) {
        previous = old;
        isComplete = false;
        shown.set(name, served.get(name));
        continue;
      } else if (name === "curves") {
        updateCurves(old, fresh, JSON.parse(data.textContent));
        previous = document.getElementById("curves");
      } else {
        replace(old, fresh);
        previous = fresh;
      }
      shown.set(name, html);
    }
    for (const section of sections(document)) if (!shown.has(key(section))) section.remove();
    served = shown;
    document.getElementById("written").textContent = newer.getElementById("written").textContent;
    return isComplete;
  }

  // What is at the top of the window stays there.
  function keepPosition(change) {
    const top = sections(document).find((section) => section.id && section.getBoundingClientRect().bottom > 60);
    const before = top?.getBoundingClientRect().top;
    const result = change();
    const same = top && document.getElementById(top.id);
    if (same && scrollY > 0) scrollBy({ top: same.getBoundingClientRect().top - before, behavior: "instant" });
    return result;
  }

  async function poll() {
    try {
      const headers = tag ? { "If-None-Match": tag } : {};
      const answer = await fetch(location.pathname, { headers, signal: AbortSignal.timeout(timeout_ms) });
      if (answer.status === 200) {
        const newer = new DOMParser().parseFromString(await answer.text(), "text/html");
        tag = keepPosition(() => update(newer)) ? answer.headers.get("ETag") : null;
        show("live");
      } else if (answer.status === 304) {
        show("live");
      } else if (answer.status === 404) {
        return show("ended: this address is not valid any more. Open the one that isthmus report --live has printed.", true);
      } else {
        show((await answer.text()).trim(), true);
      }
    } catch {
      show("the server does not answer. isthmus report --live has ended, or its tunnel.", true);
    }
    setTimeout(next, interval_ms);
  }

  // A page that nobody sees asks for nothing.
  function next() {
    if (document.hidden) document.addEventListener("visibilitychange", next, { once: true });
    else poll();
  }
  setTimeout(next, interval_ms);
})();
