// The claims' table: shows the rows with every search word and the chosen verdict.
document.addEventListener("DOMContentLoaded", () => {
  const table = document.querySelector("main table");
  const rows = [...table.tBodies[0].rows];
  const bar = document.createElement("p");
  bar.innerHTML =
    '<label>Search <input id="claims-words" type="search"></label> ' +
    '<label>Verdict <select id="claims-verdict"><option>any</option></select></label> ' +
    '<span id="claims-count" aria-live="polite"></span>';
  table.parentElement.insertBefore(bar, table);
  const [words, verdict] = bar.querySelectorAll("input, select");
  const column = [...table.tHead.rows[0].cells].findIndex((c) => c.innerText === "verdict");
  const verdictOf = (row) => row.cells[column].innerText.trim();
  for (const name of new Set(rows.map(verdictOf))) verdict.add(new Option(name));
  const show = () => {
    const wanted = words.value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      const text = row.innerText.toLowerCase();
      const fits = verdict.value === "any" || verdictOf(row) === verdict.value;
      row.hidden = !(fits && wanted.every((word) => text.includes(word)));
    }
    const count = rows.filter((row) => !row.hidden).length;
    bar.querySelector("span").innerText = `${count} of ${rows.length}`;
  };
  words.addEventListener("input", show);
  verdict.addEventListener("input", show);
  show();
});
