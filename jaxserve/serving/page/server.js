"use strict";
// The server: requests to it, and its errors in its own words. Addresses are relative, for proxies that show it under a path.

class ServerError extends Error {}

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: "Bearer " + key } : {}) };
}

/** The message of an answer that is an error; of one that is not our server's, its status. */
async function messageOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server answered ${response.status} ${response.statusText}`.trim() + ".";
  }
}

/** The data of each server-sent event (WHATWG HTML, 9.2.6; only the field `data` is read). */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let rest = ""; ;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter(line => line.startsWith("data:"));
        if (lines.length) yield lines.map(line => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});  // it may have failed already
  }
}

/** The chunks of a chat's answer. Throws ServerError, and the signal's AbortError. */
async function* ask(request, key, signal) {
  try {
    const response = await fetch("v1/chat/completions",
      { method: "POST", headers: headers(key), body: JSON.stringify(request), signal });
    if (!response.ok) throw new ServerError(await messageOf(response));
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof TypeError) throw new ServerError("The connection failed: the server does not run, or can't be reached.");
    throw error;
  }
  throw new ServerError("The answer broke off: the connection was closed before its end.");
}

/** A body of the server's as text, or null where it gives none. */
async function read(path, key) {
  try {
    const response = await fetch(path, { headers: headers(key) });
    return response.ok ? await response.text() : null;
  } catch {
    return null;
  }
}
