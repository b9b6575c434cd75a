/**
 * Python in a thread of its own: loads Pyodide and the simulator, and answers one request after another.
 *
 *   {do: "start", manifest}    -> {progress: share} ..., then {ready: true} or {error}
 *   {do: "ask", id, request}   -> {id, answer}: a JSON text in, a JSON text out (`simulator/entry.py`)
 *
 * The page ends this worker when an answer takes too long, and starts another one.
 * Once Python is there, it needs nothing from outside any more. So the ways out are closed before any code of a reader's,
 * or of a link's, is run: no `fetch` and its like, and no `js` module in Python.
 */

const CLOSED = [
  "fetch",
  "XMLHttpRequest",
  "WebSocket",
  "EventSource",
  "WebTransport",
  "Worker",
  "importScripts",
  "indexedDB",
  "caches",
];
const HIDDEN_MODULES = ["js", "pyodide_js", "pyodide.http", "pyodide.code"];
let entry = null;

self.addEventListener("message", async ({ data }) => {
  if (data.do === "start") {
    try {
      entry = await start(data.manifest);
      self.postMessage({ ready: true });
    } catch (error) {
      self.postMessage({ error: String(error?.message ?? error) });
    }
  } else {
    try {
      self.postMessage({ id: data.id, answer: entry.handle(data.request) });
    } catch (error) {
      self.postMessage({ id: data.id, error: String(error?.message ?? error) });
    }
  }
});

async function start(manifest) {
  const { files } = manifest.packages.pyodide;
  countBytes(Object.values(files).reduce((sum, size) => sum + size, 0));
  const texts = manifest.python.map(async (path) => {
    const response = await fetch(new URL(path, import.meta.url));
    if (!response.ok) {
      throw new Error(`There is no ${path} (HTTP ${response.status}).`);
    }
    return [path, await response.text()];
  });
  const folder = new URL("vendor/pyodide/", import.meta.url);
  const { loadPyodide } = await import(new URL("pyodide.mjs", folder));
  const pyodide = await loadPyodide({ indexURL: folder.href });
  for (const [path, text] of await Promise.all(texts)) {
    const file = `/playground/${path}`;
    pyodide.FS.mkdirTree(file.slice(0, file.lastIndexOf("/")));
    pyodide.FS.writeFile(file, text);
  }
  pyodide.runPython("import sys; sys.path.insert(0, '/playground')");
  const module = pyodide.pyimport("simulator.entry");
  pyodide.runPython(`for name in ${JSON.stringify(HIDDEN_MODULES)}: sys.modules[name] = None`);
  CLOSED.forEach((name) => Object.defineProperty(self, name, { value: undefined }));
  return module;
}

/** Tell how much of `total` bytes has been fetched, whoever fetches it. */
function countBytes(total) {
  const original = self.fetch;
  let loaded = 0;
  self.fetch = async (...args) => {
    const response = await original(...args);
    if (!response.ok || response.body === null) {
      return response;
    }
    const counter = new TransformStream({
      transform(chunk, controller) {
        loaded += chunk.byteLength;
        self.postMessage({ progress: Math.min(loaded / total, 1) });
        controller.enqueue(chunk);
      },
    });
    const { status, statusText, headers } = response;
    return new Response(response.body.pipeThrough(counter), { status, statusText, headers });
  };
}
