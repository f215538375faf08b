// An explorer's controls choose among its answers, which were computed when the site was built.
document.addEventListener("DOMContentLoaded", () => {
  for (const explorer of document.querySelectorAll(".explorer")) {
    const form = explorer.querySelector("form");
    const controls = [...form.querySelectorAll("input, select")];
    const shown = explorer.querySelector(".explorer-answer");
    const parts = [...explorer.querySelectorAll("template")];
    const answers = JSON.parse(explorer.querySelector("script").textContent);
    const say = (slider) => {
      const words = JSON.parse(slider.dataset.values)[slider.value];
      slider.setAttribute("aria-valuetext", words);
      slider.nextElementSibling.value = words;
    };
    const show = () => {
      let place = 0;
      for (const control of controls) {
        if (control.options) {
          place = place * control.options.length + control.selectedIndex;
        } else {
          place = place * (Number(control.max) + 1) + Number(control.value);
          say(control);
        }
      }
      const answer = answers[place].map((part) => parts[part].content.cloneNode(true));
      shown.replaceChildren(...answer);
    };
    form.addEventListener("input", show);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.hidden = false;
    // A browser may restore the controls' values from when the page was left.
    show();
  }
});
