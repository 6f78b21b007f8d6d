/* A page that is read from a disk may not start a worker: run the search in a hidden frame instead. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.queue = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.title = "search"
      document.body.append(frame)
      const inner = frame.contentWindow
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inner.document.createElement("script")
      script.src = url
      script.onload = () => {
        this.ready = inner
        this.queue.forEach(data => this.send(data))
      }
      inner.document.documentElement.append(script)
    }
    send(data) {
      this.ready.dispatchEvent(new this.ready.MessageEvent("message", { data }))
    }
    postMessage(data) {
      this.ready ? this.send(data) : this.queue.push(data)
    }
    terminate() {}
  }
}
