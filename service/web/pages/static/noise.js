// A slider for σ against ε; its positions are the rows of the table that the server computed.
(() => {
  const initialise = () => {
    const slider = document.getElementById("noise-at");
    const holder = slider?.closest("#noise");
    if (!slider || !holder.querySelector(".slider[hidden]")) return;
    const rows = [...holder.querySelectorAll("table.noise tbody tr")];
    const output = holder.querySelector("output");
    const show = () => {
      const row = rows[slider.value];
      const [sigma, epsilon] = [...row.cells].map((cell) => cell.textContent.trim());
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
  initialise();
  document.addEventListener("htmx:load", initialise);
})();
