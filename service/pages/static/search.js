// The key "/" goes to the search box, unless one is writing.
addEventListener("keydown", (event) => {
  const writing = event.target.closest("input, textarea, select, [contenteditable]");
  const box = document.getElementById("everything");
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || writing || !box) return;
  event.preventDefault();
  box.focus();
});
