// Before the first paint: the colours that were chosen by hand, if any were. Else they follow the system.
try {
  const chosen = localStorage.getItem("warmroute-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // A browser that keeps nothing follows the system.
}
