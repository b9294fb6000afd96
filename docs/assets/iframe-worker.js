// Browsers do not start web workers from file://. There, run the search worker of the site in a hidden iframe.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html><title>search</title>";
      this.loaded = new Promise((resolve, reject) => {
        frame.onload = () => {
          const inner = frame.contentWindow;
          inner.postMessage = data => setTimeout(() => this.dispatchEvent(new MessageEvent("message", {data})));
          const script = inner.document.createElement("script");
          script.src = url;
          script.onload = () => resolve(inner);
          script.onerror = reject;
          inner.document.head.appendChild(script);
        };
      });
      document.documentElement.appendChild(frame);
    }

    postMessage(data) {
      this.loaded.then(inner => inner.dispatchEvent(new MessageEvent("message", {data})));
    }

    terminate() {}
  };
}
