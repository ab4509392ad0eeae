// σ against ε as one drags: each place of the slider is a row of the table, computed by the server.
(() => {
  const wake = () => {
    const slider = document.getElementById("noise-at");
    const holder = slider?.closest("#noise");
    if (!slider || !holder.querySelector(".slider[hidden]")) return;
    const rows = [...holder.querySelectorAll("table.noise tbody tr")];
    const output = holder.querySelector("output");
    const show = () => {
      const row = rows[slider.value];
      const [sigma, epsilon] = [...row.cells].map((each) => each.textContent.trim());
      output.textContent = `σ = ${sigma}: ε ≤ ${epsilon}`;
      slider.setAttribute("aria-valuetext", output.textContent);
      const use = row.querySelector("button");
      holder.querySelector(".slider button")?.remove();
      if (use) holder.querySelector(".slider").append(use.cloneNode(true));
    };
    slider.value = rows.findIndex((row) => row.classList.contains("marked"));
    slider.addEventListener("input", show);
    holder.querySelector(".slider").hidden = false;
    show();
  };
  wake();
  document.addEventListener("htmx:load", wake);
})();
