"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const [text, family, name, older, quiet] = ["text", "family", "name", "older", "quiet"].map(byId);
  const heads = [...document.querySelectorAll(".matrix thead th")];
  const rows = [...document.querySelectorAll(".matrix tbody tr")];

  const apply = () => {
    const shown = heads.map((head, place) => place === 0
      || ((name.value === "" || head.dataset.name === name.value)
        && (older.checked || name.value !== "" || !("older" in head.dataset))));
    heads.forEach((head, place) => { head.hidden = !shown[place]; });
    let count = 0;
    for (const row of rows) {
      const check = row.dataset.check;
      row.hidden = !(check.includes(text.value.trim().toLowerCase())
        && (family.value === "" || check.startsWith(family.value + "."))
        && (quiet.checked || !("quiet" in row.dataset)));
      [...row.cells].forEach((cell, place) => { cell.hidden = !shown[place]; });
      if (!row.hidden) count += 1;
    }
    byId("count").textContent = `${count} of ${rows.length} checks`;
  };
  for (const control of [text, family, name, older, quiet]) control.addEventListener("input", apply);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").hidden = false; // without scripts the whole table is there
  apply();
})();
