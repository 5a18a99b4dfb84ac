// Server-sent events while the page is visible: a hidden tab costs nothing, and a browser allows six streams per server.
export function follow(address, listeners, onState) {
  let source = null;
  function open() {
    if (source) return;
    source = new EventSource(address());
    source.onopen = () => onState("live");
    source.onerror = () => onState(source && source.readyState === EventSource.CLOSED
      ? "not connected: the server has ended, or was started again with another token"
      : "connection lost; trying again");
    Object.entries(listeners).forEach(([name, listener]) => {
      source.addEventListener(name, (event) => listener(JSON.parse(event.data)));
    });
  }
  function close() {
    if (source) source.close();
    source = null;
  }
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  window.addEventListener("pagehide", close);
  if (!document.hidden) open();
  return close;
}
