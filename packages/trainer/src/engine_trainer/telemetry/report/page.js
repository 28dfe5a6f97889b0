"use strict";
// The page's script. It shows the values of a step beneath its curve; texts become text nodes only.
(() => {
  for (const figure of document.querySelectorAll(".curve")) {
    const svg = figure.querySelector("svg");
    const hits = [...figure.querySelectorAll(".hits rect")];
    const values = figure.querySelector(".values");
    const cursor = figure.querySelector(".cursor");
    const last = values.textContent;
    // The titles would cover what the cursor shows.
    const texts = hits.map((hit) => {
      const title = hit.querySelector("title");
      const text = title.textContent;
      title.remove();
      return text;
    });
    let at = hits.length - 1;

    function show(index) {
      at = Math.min(hits.length - 1, Math.max(0, index));
      values.textContent = texts[at];
      for (const end of ["x1", "x2"]) cursor.setAttribute(end, hits[at].dataset.x);
      svg.classList.add("read");
    }

    function follow(event) {
      const index = hits.indexOf(event.target);
      if (index >= 0) show(index);
    }

    function rest() {
      values.textContent = last;
      svg.classList.remove("read");
    }

    svg.addEventListener("pointermove", follow);
    svg.addEventListener("pointerdown", follow);
    // A finger leaves as soon as it is lifted: its value stays.
    svg.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "touch") rest();
    });
    svg.addEventListener("blur", rest);
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      show(at + step);
    });
  }
})();
