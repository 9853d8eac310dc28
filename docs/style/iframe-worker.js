// A page that is opened from the disk may start no Worker, and the search runs in one. There, and only there, this
// stands in for it: the worker's script in a frame of its own, messages passed on by hand.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.ready = new Promise((resolve) => {
        document.addEventListener("DOMContentLoaded", () => document.body.append(frame));
        if (document.body) document.body.append(frame);
        frame.addEventListener("load", () => {
          const inside = frame.contentWindow, script = inside.document.createElement("script");
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          inside.importScripts = () => {};
          script.src = url;
          script.addEventListener("load", () => resolve(inside));
          inside.document.body.append(script);
        }, { once: true });
      });
    }
    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
