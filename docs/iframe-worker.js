// Browsers give no worker to a page that was opened from the file system. There the worker's script runs in a hidden
// frame instead, so that the search needs no server. (The theme's own remedy would be fetched from the web.)
if (location.protocol === "file:") {
  window.Worker = class {
    onmessage = null;

    constructor(url) {
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script src="${url}"></script>`;
      this.frame = frame;
      this.ready = new Promise((resolve) => {
        frame.onload = () => {
          // As from a real worker: a task of its own, and a copy.
          frame.contentWindow.postMessage = (answer) => {
            const data = structuredClone(answer);
            setTimeout(() => this.onmessage?.({ data }));
          };
          resolve(frame.contentWindow);
        };
      });
      document.body.append(frame);
    }

    postMessage(question) {
      const data = structuredClone(question);
      this.ready.then((inside) => inside.onmessage({ data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
