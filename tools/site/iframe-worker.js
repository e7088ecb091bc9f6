// Browsers start no worker for a page that is opened from a folder (file://). There this takes the
// worker's place, so that the search works: its script runs in a hidden frame.
if (location.protocol === "file:") {
  // The search looks for this name.
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.document.open();
      inside.document.write("<!doctype html><html><body></body></html>");
      inside.document.close();
      const load = (script) =>
        new Promise((loaded, failed) => {
          const element = inside.document.createElement("script");
          element.src = script;
          element.onload = loaded;
          element.onerror = failed;
          inside.document.body.append(element);
        });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...scripts) =>
        scripts.reduce((before, script) => before.then(() => load(script)), Promise.resolve());
      this.loaded = load(url);
    }

    postMessage(data) {
      const { contentWindow } = this.frame;
      this.loaded.then(() => contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
