// The key "/" focuses the search box, except in a text field.
addEventListener("keydown", (event) => {
  const isEditing = event.target.closest("input, textarea, select, [contenteditable]");
  const box = document.getElementById("everything");
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || isEditing || !box) return;
  event.preventDefault();
  box.focus();
});
